"""Stand-in for Numba: the attributes that the agent reads, on the stand-in driver."""

__version__ = "0.68.1"
