"""Configuration: settings, their file, TLS and tokens."""
