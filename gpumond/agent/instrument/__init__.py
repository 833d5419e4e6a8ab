"""Functions that a program calls: scopes, steps, retries, limits and snapshots."""
