"""One tick without I/O: observed facts, claims, ledger, history and events."""
