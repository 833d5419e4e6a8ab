"""Stand-in for RMM (26.10): stacks of memory resources, one for each device, in a Python dictionary."""

from __future__ import annotations

from . import mr, statistics

__all__ = ["mr", "statistics"]
__version__ = "26.10.00"
