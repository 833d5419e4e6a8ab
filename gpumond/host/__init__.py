"""Operating system interfaces: peer credentials, runtime directories, systemd, file descriptors and logs."""
