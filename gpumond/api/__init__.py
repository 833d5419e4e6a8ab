"""The HTTP face of the daemon."""
