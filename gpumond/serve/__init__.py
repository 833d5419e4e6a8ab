"""HTTP API of the daemon."""
