"""One tick without I/O: observed facts, claims, ledger and history."""
