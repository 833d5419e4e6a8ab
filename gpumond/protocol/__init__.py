"""Messages between agent and daemon, and their two decoders."""
