"""Stands in for RMM (26.10): memory resources over each other, one stack a device, in a dictionary of Python's."""

from __future__ import annotations

from . import mr, statistics

__all__ = ["mr", "statistics"]
__version__ = "26.10.00"
