"""Account for every byte of GPU memory, and give it back with a receipt."""

__version__ = "0.1.0"
