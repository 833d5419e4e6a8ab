"""Work on the event loop: long computations in bounded slices, and background tasks that end with their block."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from gpumond.facts.cooperative import Steps, T

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


log = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""The pause before a task that has not ended is cancelled again."""


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` as a task; at the end of the block it is cancelled and awaited. An error of it is logged."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        while not task.done():  # `asyncio.wait_for` of Python 3.11 can swallow a cancellation
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if not task.cancelled() and (error := task.exception()):
            log.error("a background task failed", exc_info=error)


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their end. Before Python 3.12, ``wait_for`` swallows a cancellation at times."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1.0)
