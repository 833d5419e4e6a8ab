"""What all commands use: the client of the daemon, values of options, exit codes."""
