"""Persistence of the history and of what programs did before: a few series are gathered at each tick, so that no tick
waits for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from gpumond.diagnosis.past import EarlierUses
from gpumond.facts.errors import StoreUnavailable
from gpumond.store.store import Store
from gpumond.tick.history import CoarseSeries, History

EVERY_SECONDS = 300.0
SERIES_A_TICK = 4
"""Number of series gathered at a tick, at about 0.3 ms each."""


class HistoryPersistence:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._under_way: Iterator[CoarseSeries] | None = None
        self._gathered: list[CoarseSeries] = []
        self._due = EVERY_SECONDS
        self._writing: asyncio.Future[None] | None = None

    async def restore(self, history: History, earlier_uses: EarlierUses) -> None:
        """Restore the previous daemon's series for devices and processes that still exist, and its records."""
        try:
            history.restore(await self._store.history())
            earlier_uses.restore(await self._store.earlier_uses())
        except StoreUnavailable:
            pass  # the store has logged it

    def advance(self, history: History, earlier_uses: EarlierUses, elapsed: float) -> None:
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
            self._writing = asyncio.ensure_future(self._write(series, earlier_uses))

    async def close(self, history: History, earlier_uses: EarlierUses) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(tuple(history.coarse()), earlier_uses)

    async def _write(self, series: tuple[CoarseSeries, ...], earlier_uses: EarlierUses) -> None:
        try:
            await self._store.keep_history(series)
            await self._store.keep_earlier_uses(earlier_uses.records())
        except StoreUnavailable:
            pass  # the store has logged it; the next write includes it
