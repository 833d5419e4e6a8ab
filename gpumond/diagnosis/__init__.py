"""Verdicts on the memory curves of devices and processes. No I/O."""
