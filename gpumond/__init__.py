"""GPU memory accounting, alerts and flushes with a receipt."""

__version__ = "0.1.0"
