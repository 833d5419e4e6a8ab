"""Persistence of the history and of what programs did before: a few series are gathered at each tick, so that no tick
waits for all; and removal of rows that are too old, and of the oldest where there are too many.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from gpumond.diagnosis.past import Past, Pasts
from gpumond.facts.alerts import Heartbeat
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.units import DAY_SECONDS
from gpumond.store import audit as audit_table
from gpumond.tick.history import CoarseSeries, History

LATE_RATIO = 1.05
"""The audit is trimmed when its first entry is so much older than the retention, and then to the retention: not at
every entry that grows too old, since each trim is an entry itself."""

CLOCK_SECONDS = 60.0
ROW_BYTES = 300
"""Bytes of a row without its longest column."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the store; ``max_bytes`` is that of the whole file."""

    seconds: float = 90 * DAY_SECONDS
    max_bytes: int = 64 * 1024**2
    max_entries: int = 100_000
    max_entries_of_a_user: int = 5_000
    max_receipts: int = 10_000
    max_past_alerts: int = 10_000


def same_clock(before: Heartbeat, now: Heartbeat) -> bool:
    """Return True if the clock was not set in between."""
    return abs((now.at - before.at) - (now.monotonic - before.monotonic)) <= CLOCK_SECONDS


def remove_old(db: sqlite3.Connection, bounds: Bounds, now: float) -> None:
    """Remove rows that are older than the bounds allow, in the open transaction."""
    cut = now - bounds.seconds
    for table in ("receipts", "past_alerts"):
        db.execute(f"DELETE FROM {table} WHERE at < ?", (cut,))
    audit_table.trim_old(db, now - LATE_RATIO * bounds.seconds, cut)


def remove_excess(db: sqlite3.Connection, bounds: Bounds, chain: str = audit_table.ADMINISTRATORS) -> None:
    """Remove rows beyond the bounds, in the open transaction. ``chain`` has the newest entry."""
    most_entries = bounds.max_entries_of_a_user if chain else bounds.max_entries
    if audit_table.count(db, chain) > most_entries:
        audit_table.trim_oldest(db, chain)
    for table, most in (("receipts", bounds.max_receipts), ("past_alerts", bounds.max_past_alerts)):
        while (excess := _count(db, table) - most) > 0:
            _remove_oldest(db, table, _largest(db, table, "count(*)"), excess)
    if _size(db) > bounds.max_bytes:
        _remove_bytes(db, bounds.max_bytes)


def _remove_bytes(db: sqlite3.Connection, most: int) -> None:
    """Bring each table down to its share of the file: half for the administrators' audit, an eighth for the users',
    for receipts and for alerts that are over. If none has more, what fills the file is bounded elsewhere."""
    while _bytes(db, "audit", "detail") > most // 2 and audit_table.count(db) > 2:
        audit_table.trim_oldest(db)
    while _bytes(db, "user_audit", "detail") > most // 8 and (chain := audit_table.largest_user_chain(db)):
        audit_table.trim_oldest(db, chain)
    for table in ("receipts", "past_alerts"):
        while _bytes(db, table, "body") > most // 8:
            owner = _largest(db, table, "sum(length(body))")
            rows = db.execute(f"SELECT count(*) FROM {table} WHERE owner = ?", (owner,)).fetchone()[0]
            _remove_oldest(db, table, owner, 1 + rows // 10)


def _remove_oldest(db: sqlite3.Connection, table: str, owner: object, rows: int) -> None:
    oldest = f"SELECT seq FROM {table} WHERE owner = ? ORDER BY seq LIMIT ?"
    db.execute(f"DELETE FROM {table} WHERE seq IN ({oldest})", (owner, rows))


def _largest(db: sqlite3.Connection, table: str, measure: str) -> object:
    """Return the user with the most, if users have more than half; else the largest of the others."""
    sizes = db.execute(f"SELECT owner, {measure} AS size FROM {table} GROUP BY owner ORDER BY size DESC").fetchall()
    users = [(owner, size) for owner, size in sizes if audit_table.is_user(str(owner))]
    others = [each for each in sizes if each not in users]
    if 2 * sum(size for _, size in users) > sum(size for _, size in sizes) or not others:
        return users[0][0]
    return others[0][0]


def _count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _bytes(db: sqlite3.Connection, table: str, column: str) -> int:
    return int(db.execute(f"SELECT total(length({column}) + {ROW_BYTES}) FROM {table}").fetchone()[0])


def _size(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


EVERY_SECONDS = 300.0
SERIES_A_TICK = 4
"""Number of series gathered at a tick, at about 0.3 ms each."""


class HistoryStore(Protocol):
    """Methods of the store that are used; each raises StoreUnavailable."""

    async def keep_history(self, history: Iterable[CoarseSeries]) -> None: ...
    async def history(self) -> list[CoarseSeries]: ...
    async def keep_pasts(self, pasts: Iterable[Past]) -> None: ...
    async def pasts(self) -> list[Past]: ...


class HistoryPersistence:
    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._under_way: Iterator[CoarseSeries] | None = None
        self._gathered: list[CoarseSeries] = []
        self._due = EVERY_SECONDS
        self._writing: asyncio.Future[None] | None = None

    async def restore(self, history: History, pasts: Pasts) -> None:
        """Restore the previous daemon's series for devices and processes that still exist, and its records."""
        try:
            history.restore(await self._store.history())
            pasts.restore(await self._store.pasts())
        except StoreUnavailable:
            pass  # the store has logged it

    def advance(self, history: History, pasts: Pasts, elapsed: float) -> None:
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
            self._writing = asyncio.ensure_future(self._write(series, pasts))

    async def close(self, history: History, pasts: Pasts) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(tuple(history.coarse()), pasts)

    async def _write(self, series: tuple[CoarseSeries, ...], pasts: Pasts) -> None:
        try:
            await self._store.keep_history(series)
            await self._store.keep_pasts(pasts.records())
        except StoreUnavailable:
            pass  # the store has logged it; the next write includes it
