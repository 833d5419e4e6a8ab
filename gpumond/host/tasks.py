"""Background tasks on the event loop that end with their block, and signals between tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_SECONDS = 1.0
"""The pause before a task that has not ended is cancelled again."""


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run ``work`` as a task; at the end of the block it is cancelled and awaited. An error of it is logged."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_all([task])
        if not task.cancelled() and (error := task.exception()):
            log.error("a background task failed", exc_info=error)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end. Before Python 3.12, ``wait_for`` swallows a cancellation at times."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)


class Tasks(set["asyncio.Task[Any]"]):
    """Tasks in progress. Their errors are those of whoever awaits them."""

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def finish(self) -> None:
        """Wait for their end."""
        await asyncio.gather(*self, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel them once, and wait for their end, before which they may write what they have done."""
        for task in self:
            task.cancel()
        await self.finish()


EVENT_LOOP_TURNS = 6
"""Turns of the event loop from the arrival of a request on a new connection to its answer."""


async def serve_pending_requests() -> None:
    """Let the event loop answer the requests that have arrived."""
    for _ in range(EVENT_LOOP_TURNS):
        await asyncio.sleep(0)


class Broadcast:
    """Wakes those who wait for it now; later ones wait for the next."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def send(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait at most ``seconds``. Returns False on timeout."""
        try:
            await asyncio.wait_for(self._next.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True
