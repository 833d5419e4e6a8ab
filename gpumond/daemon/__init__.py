"""The daemon: its parts, its tick and its requests."""
