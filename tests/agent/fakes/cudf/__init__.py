"""Fake for cuDF (26.10): its spill manager, and buffers that it can move to the host."""

from __future__ import annotations

from .core.buffer import spill_manager

__all__ = ["spill_manager"]
__version__ = "26.10.02"
