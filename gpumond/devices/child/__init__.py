"""The child process that owns the driver, its supervisor, and their pipe."""
