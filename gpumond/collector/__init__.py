"""The child process that owns the driver, its supervisor, and the messages between them."""
