"""Fake for RMM (26.10): stacks of memory resources, one for each device, in a Python dictionary."""

from __future__ import annotations

from . import mr, statistics

__all__ = ["mr", "reinitialize", "statistics"]
__version__ = "26.10.00"


def reinitialize(
    pool_allocator: bool = False,
    managed_memory: bool = False,
    initial_pool_size: int = 0,
    devices: int | list[int] = 0,
) -> None:
    mr.initialize(pool_allocator, managed_memory, initial_pool_size, [devices] if isinstance(devices, int) else devices)
