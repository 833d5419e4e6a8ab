"""Long work on the event loop, in slices of bounded time."""

from __future__ import annotations

import asyncio
import time

from gpumond.model.cooperative import Steps, T

SLICE_SECONDS = 0.001
"""The longest that such work occupies the event loop at once, apart from the step that exceeds it."""


async def in_slices(work: Steps[T], share: float = 1.0) -> T:
    """Return the result of ``work``, which other tasks interrupt after each slice.

    Work that takes less than one slice is done at once. ``share``: the part of the time that ``work`` may use; after
    each slice it waits for the rest.
    """
    since = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        used = time.perf_counter() - since
        if used > SLICE_SECONDS:
            await asyncio.sleep(used / share - used)
            since = time.perf_counter()
