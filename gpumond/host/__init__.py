"""The operating system: peer credentials, runtime directories, systemd, file descriptors and logs."""
