"""AMD and Intel devices, read from kernel files."""
