"""Persistent state in one SQLite file."""
