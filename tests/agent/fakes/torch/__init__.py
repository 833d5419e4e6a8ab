"""Fake for PyTorch with CUDA: the functions that the agent uses, over the blocks that a test defines in `world`.

Functions that the agent must never call, because they initialize CUDA or create a context, raise an error.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

from . import _C, cuda, xpu
from .world import WORLD

__all__ = ["WORLD", "_C", "cuda", "version", "xpu"]
__version__ = "2.13.0"
version = SimpleNamespace(hip=None)


def _cufft_get_plan_cache_size(device: int) -> int:
    return WORLD.plans.get(device, 0)


def _cufft_clear_plan_cache(device: int) -> None:
    WORLD.calls.append(f"clear_plans of {device} in {threading.current_thread().name}")
    WORLD.plans.pop(device, None)
