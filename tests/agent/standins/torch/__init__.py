"""Stands in for PyTorch with CUDA: the surface that the agent uses, over blocks that a test lays out in `world`.

What the agent must never call (it would initialise CUDA, or create a context) fails loudly.
"""

from __future__ import annotations

from types import SimpleNamespace

from . import _C, cuda, xpu
from .world import WORLD

__all__ = ["WORLD", "_C", "cuda", "version", "xpu"]
__version__ = "2.13.0"
version = SimpleNamespace(hip=None)
