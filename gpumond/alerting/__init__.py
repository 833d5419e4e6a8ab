"""Alerts after a tick: dispatch, queues and receivers."""
