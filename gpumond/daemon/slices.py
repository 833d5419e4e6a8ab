"""Runs the steps of long work on the event loop, and lets other tasks run between them."""

from __future__ import annotations

import asyncio
import time

from gpumond.model.cooperative import Steps, T

SLICE_SECONDS = 0.002
"""Other tasks wait so long for the tick, or for as long as its longest step."""


async def in_slices(work: Steps[T]) -> T:
    """Run ``work`` to its end. Other tasks run after each slice; work shorter than one slice is not interrupted."""
    since = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        if time.perf_counter() - since > SLICE_SECONDS:
            await asyncio.sleep(0)
            since = time.perf_counter()
