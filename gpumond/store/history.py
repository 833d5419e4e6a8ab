"""Persistence of the history: a few series are gathered at each tick, so that no tick waits for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from gpumond.facts.errors import StoreUnavailable
from gpumond.tick.history import CoarseSeries, History

EVERY_SECONDS = 300.0
SERIES_A_TICK = 4
"""Number of series gathered at a tick, at about 0.3 ms each."""


class HistoryStore(Protocol):
    """Methods of the store that are used; each raises StoreUnavailable."""

    async def keep_history(self, history: Iterable[CoarseSeries]) -> None: ...
    async def history(self) -> list[CoarseSeries]: ...


class HistoryPersistence:
    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._under_way: Iterator[CoarseSeries] | None = None
        self._gathered: list[CoarseSeries] = []
        self._due = EVERY_SECONDS
        self._writing: asyncio.Future[None] | None = None

    async def restore(self, history: History) -> None:
        """Restore the previous daemon's series for devices and processes that still exist."""
        try:
            history.restore(await self._store.history())
        except StoreUnavailable:
            pass  # the store has logged it

    def advance(self, history: History, elapsed: float) -> None:
        """Gather and write the part of one tick. Waits for nothing."""
        if self._under_way is None:
            if elapsed < self._due:
                return
            self._under_way = history.coarse()
        batch = list(islice(self._under_way, SERIES_A_TICK))
        self._gathered += batch
        if not batch:
            series, self._gathered = tuple(self._gathered), []
            self._under_way, self._due = None, elapsed + EVERY_SECONDS
            self._writing = asyncio.ensure_future(self._write(series))

    async def close(self, history: History) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(tuple(history.coarse()))

    async def _write(self, series: tuple[CoarseSeries, ...]) -> None:
        try:
            await self._store.keep_history(series)
        except StoreUnavailable:
            pass  # the store has logged it; the next write includes it
