"""The subcommands of `gpumond fleet`."""
