"""Fake for Numba: the attributes that the agent reads, on the fake driver."""

__version__ = "0.68.1"
