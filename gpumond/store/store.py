"""Persistent state: rules and overrides, silences, audit log, receipts, past and active alerts, undelivered
notifications, requests for memory, history, baselines.

SQLite in WAL mode with synchronous=FULL: an acknowledged change is on the disk. One thread writes, so the event
loop waits for no disk. A store that cannot commit reports it (``writable``, ``trouble``), rejects changes, and tries
again every few seconds; the daemon continues without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gpumond.diagnosis.previous_runs import EarlierUse, EarlierUses
from gpumond.facts.alerts import DaemonActivity, Notification, StoredAlert
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.facts.pools import Receipt
from gpumond.facts.snapshot import Fault
from gpumond.facts.units import DAY_SECONDS
from gpumond.host.peer import counted_name
from gpumond.store import audit as audit_table
from gpumond.store.audit import ADMINISTRATORS, AuditEntry, canonical
from gpumond.store.database import Database, Worker
from gpumond.store.table import RowDecoder, checked_text, coarse_text, from_text, stored_notification, to_text
from gpumond.tick.history import CoarseSeries, History

log = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_SECONDS = 5.0
OPEN_SECONDS = 2.0
TRIM_SECONDS = 600.0

CLOCK_SECONDS = 60.0
ROW_BYTES = 300
"""Bytes of a row without its longest column."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the store; ``max_bytes`` is that of the whole file."""

    seconds: float = 90 * DAY_SECONDS
    max_bytes: int = 64 * 1024**2
    max_entries: int = 100_000
    max_entries_of_a_user: int = 5_000
    max_receipts: int = 10_000
    max_past_alerts: int = 10_000


def same_clock(before: DaemonActivity, now: DaemonActivity) -> bool:
    """Return True if the clock was not set in between."""
    return abs((now.at - before.at) - (now.monotonic - before.monotonic)) <= CLOCK_SECONDS


def remove_old(db: sqlite3.Connection, bounds: StoreLimits, now: float) -> None:
    """Remove rows that are older than the bounds allow, in the open transaction."""
    cut = now - bounds.seconds
    for table in ("receipts", "past_alerts"):
        db.execute(f"DELETE FROM {table} WHERE at < ?", (cut,))
    audit_table.remove_old(db, cut)


def remove_excess(db: sqlite3.Connection, bounds: StoreLimits, owner: str = ADMINISTRATORS) -> None:
    """Remove rows beyond the bounds, in the open transaction. ``owner`` has the newest audit entry."""
    most_entries = bounds.max_entries if owner == ADMINISTRATORS else bounds.max_entries_of_a_user
    if audit_table.count(db, owner) > most_entries:
        audit_table.remove_oldest(db, owner)
    for table, most in (("receipts", bounds.max_receipts), ("past_alerts", bounds.max_past_alerts)):
        while (excess := _count(db, table) - most) > 0:
            _remove_oldest(db, table, _largest_owner(db, table, "count(*)"), excess)
    if _size(db) > bounds.max_bytes:
        _remove_bytes(db, bounds.max_bytes)


def _remove_bytes(db: sqlite3.Connection, most: int) -> None:
    """Bring each table down to its share of the file: half for the administrators' audit, an eighth for the users',
    for receipts and for alerts that are over. If none has more, what fills the file is bounded elsewhere."""
    while _bytes(db, "audit WHERE owner = 'administrators'", "detail") > most // 2:
        audit_table.remove_oldest(db, ADMINISTRATORS)
    while _bytes(db, "audit WHERE owner <> 'administrators'", "detail") > most // 8:
        audit_table.remove_oldest(db, audit_table.user_with_most_bytes(db))
    for table in ("receipts", "past_alerts"):
        while _bytes(db, table, "body") > most // 8:
            owner = _largest_owner(db, table, "sum(length(body))")
            rows = db.execute(f"SELECT count(*) FROM {table} WHERE owner = ?", (owner,)).fetchone()[0]
            _remove_oldest(db, table, owner, 1 + rows // 10)


def _remove_oldest(db: sqlite3.Connection, table: str, owner: object, rows: int) -> None:
    oldest = f"SELECT seq FROM {table} WHERE owner = ? ORDER BY seq LIMIT ?"
    db.execute(f"DELETE FROM {table} WHERE seq IN ({oldest})", (owner, rows))


def _largest_owner(db: sqlite3.Connection, table: str, measure: str) -> object:
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


def _current_activity() -> DaemonActivity:
    return DaemonActivity(time.time(), time.monotonic())


class Store:
    """One file. Every method that changes something returns after the commit, or raises StoreUnavailable.

    ``bounds`` can be replaced at any time. ``clock`` returns Unix seconds and a monotonic clock's.
    """

    def __init__(
        self,
        path: Path,
        bounds: StoreLimits = StoreLimits(),
        *,
        beat_seconds: float = BEAT_SECONDS,
        clock: Callable[[], DaemonActivity] = _current_activity,
    ) -> None:
        self.path, self.bounds = path, bounds
        self._clock = clock
        self.writable = False
        self.trouble = ""
        self._corrupt_files: tuple[str, ...] = ()
        self._beat_seconds = beat_seconds
        self._trimmed = clock()
        self._thread = Worker("gpumond-store")
        self._database = Database(path)
        self.rows = RowDecoder()
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open or create the file. Never raises: a store that cannot be opened is not ``writable``, and is
        opened later.
        """
        tried = asyncio.Event()
        self._beating = asyncio.create_task(self._write_heartbeats(tried))
        try:
            await asyncio.wait_for(tried.wait(), OPEN_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            self.trouble = f"the store {self.path} takes too long to open"
            log.error("%s; the daemon continues without it", self.trouble)

    async def close(self, timeout_seconds: float = 10.0) -> None:
        """Wait up to ``timeout_seconds`` for pending writes: a disk that hangs does not block the daemon's end."""
        if self._beating:
            self._beating.cancel()
        closed = asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        if not (await asyncio.wait({closed}, timeout=timeout_seconds))[0]:
            log.error("the store %s doesn't respond; data that hasn't been written is lost", self.path)
        self._thread.shutdown()

    def faults(self) -> tuple[Fault, ...]:
        """Return the store's problems as faults for the snapshot."""
        faults = [
            Fault("store", "corrupt", None, f"{name} couldn't be read and was renamed in {self.path.parent}")
            for name in self._corrupt_files
        ]
        faults += self.rows.faults()
        if not self.writable and self.trouble:
            faults.append(Fault("store", "not_writable", None, self.trouble))
        return tuple(faults)

    def note_skipped(self, table: str, rows: int) -> None:
        """Report further rows that could be read but not used."""
        self.rows.note_skipped(table, self.rows.count(table) + rows)

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        """Add an audit entry; ``detail`` is any JSON value."""
        await self.run(lambda db: self.record(db, actor, action, detail))

    async def audit_entries(
        self, limit: int = 1000, users: bool = True, operation: str | None = None
    ) -> list[AuditEntry]:
        """Return the newest entries, oldest first; without those of ``users`` only the administrators'.

        ``operation``: only entries of the operation with this id.
        """
        return await self.run(lambda db: audit_table.newest(db, limit, users, operation))

    async def add_receipts(self, receipts: Iterable[Receipt]) -> None:
        rows = [(receipt.started_at, to_text(receipt), counted_name(receipt.requested_by)) for receipt in receipts]

        def add(db: sqlite3.Connection) -> None:
            db.executemany("INSERT INTO receipts (at, body, owner) VALUES (?, ?, ?)", rows)
            remove_excess(db, self.bounds)

        await self.run(add)

    async def receipts(self, limit: int = 1000) -> list[Receipt]:
        """Return the newest receipts, oldest first."""
        return (await self._values("receipts", Receipt, f"ORDER BY seq DESC LIMIT {limit:d}"))[::-1]

    def keep_alerts(
        self, alerts: Iterable[StoredAlert], notices: Sequence[Notification], over: Sequence[Alert] = ()
    ) -> Awaitable[None]:
        """Store all present alerts, the new notifications, and the alerts that have ended, in one transaction.

        Its place before later changes is certain once this returns, awaited or not. It is also a heartbeat:
        without it, an alert that has just fired would be younger than its ``for`` to the daemon that resumes
        it.
        """
        current = tuple(alerts)

        def keep(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM alerts")
            db.executemany("INSERT INTO alerts VALUES (?)", ((to_text(alert),) for alert in current))
            queued = ((each.receiver, each.seq, each.kind, to_text(each.alert)) for each in notices)
            db.executemany("INSERT OR REPLACE INTO notices VALUES (?, ?, ?, ?)", queued)
            ended = ((alert.resolved_at or 0.0, to_text(alert), _owner(alert)) for alert in over)
            db.executemany("INSERT INTO past_alerts (at, body, owner) VALUES (?, ?, ?)", ended)
            remove_excess(db, self.bounds)
            self._live(db)

        return self._settle(self._submit(keep))

    async def kept_alerts(self) -> tuple[list[StoredAlert], DaemonActivity | None]:
        """Return the stored alerts, and the last activity of the daemon that stored them."""
        return await self._values("alerts", StoredAlert), self._database.before

    async def past_alerts(self, limit: int = 1000) -> list[Alert]:
        """Return the newest alerts that have ended, oldest first."""
        return (await self._values("past_alerts", Alert, f"ORDER BY seq DESC LIMIT {limit:d}"))[::-1]

    async def keep_history(self, history: Iterable[CoarseSeries]) -> None:
        """Store the history, replacing the previous one."""
        await self._replace("history", map(coarse_text, history))

    async def history(self) -> list[CoarseSeries]:
        return await self._values("history", CoarseSeries)

    async def keep_earlier_uses(self, earlier_uses: Iterable[EarlierUse]) -> None:
        """Store what programs did before, replacing the previous records."""
        await self._replace("pasts", map(to_text, earlier_uses))

    async def earlier_uses(self) -> list[EarlierUse]:
        return await self._values("pasts", EarlierUse)

    async def _values(self, table: str, kind: type[T], order: str = "") -> list[T]:
        """Return the values of a table's rows that can be read."""
        rows = await self.run(lambda db: db.execute(f"SELECT body FROM {table} {order}").fetchall())
        return self.rows.read(table, rows, partial(from_text, kind))

    async def _replace(self, table: str, texts: Iterable[str]) -> None:
        """Store these rows instead of the present ones. The store's thread encodes them."""

        def replace(db: sqlite3.Connection) -> None:
            db.execute(f"DELETE FROM {table}")
            db.executemany(f"INSERT INTO {table} VALUES (?)", ((text,) for text in texts))

        await self.run(replace)

    async def record_delivery(self, notices: Sequence[Notification], accepted: bool) -> None:
        """Remove notifications from the queue; if ``accepted``, their receiver knows their alerts."""

        def deliver(db: sqlite3.Connection) -> None:
            for each in notices:
                db.execute("DELETE FROM notices WHERE receiver = ? AND seq = ?", (each.receiver, each.seq))
                key = (each.receiver, canonical(each.alert.labels))
                if each.kind == "resolved":
                    db.execute("DELETE FROM told WHERE receiver = ? AND labels = ?", key)
                elif accepted:
                    db.execute("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", (*key, to_text(each.alert)))

        await self.run(deliver)

    async def undelivered(self, receivers: Iterable[str]) -> tuple[list[Notification], list[tuple[str, Alert]]]:
        """Return queued notifications in order, and the firing alerts that each receiver knows; other
        receivers' are deleted.
        """
        names = tuple(receivers)
        among = f"({','.join('?' * len(names))})"

        def load(db: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
            for table in ("notices", "told"):
                db.execute(f"DELETE FROM {table} WHERE receiver NOT IN {among}", names)
            return (
                db.execute("SELECT receiver, seq, kind, alert FROM notices ORDER BY receiver, seq").fetchall(),
                db.execute("SELECT receiver, alert FROM told").fetchall(),
            )

        notices, known = await self.run(load)
        return (
            self.rows.read("notices", notices, stored_notification),
            self.rows.read("told", known, lambda receiver, body: (checked_text(receiver), from_text(Alert, body))),
        )

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._settle(self._submit(work))

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[tuple[T, bool]]:
        run = copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._thread, run, self._database.transaction, work)

    async def _settle(self, submitted: asyncio.Future[tuple[T, bool]]) -> T:
        try:
            done, changed = await submitted
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:  # a damaged file can raise any of them
            raise self._failed(error) from None
        if changed:  # a read says nothing about whether writes succeed
            if not self.writable:
                log.info("the store %s is writable", self.path)
            self.writable, self.trouble = True, ""
        return done

    def _failed(self, error: Exception) -> StoreUnavailable:
        full = "full" in str(error) or _is_disk_full(self.path.parent)
        trouble = f"the store {self.path} can't be written: {error}{' (the disk is full)' if full else ''}"
        if trouble != self.trouble:
            log.error("%s; monitoring and alerting continue, changes are refused", trouble)
        self.writable, self.trouble = False, trouble
        return StoreUnavailable(trouble, full)

    async def _write_heartbeat(self) -> None:
        def beat(db: sqlite3.Connection) -> tuple[str, ...]:
            self._live(db)
            return self._database.corrupt_files()

        with suppress(StoreUnavailable):  # the store has logged it
            self._corrupt_files = await self.run(beat)

    def _live(self, db: sqlite3.Connection) -> None:
        now = self._clock()
        db.execute("INSERT OR REPLACE INTO heartbeat VALUES (1, ?, ?)", (now.at, now.monotonic))

    async def _write_heartbeats(self, tried: asyncio.Event) -> None:
        while True:
            await self._write_heartbeat()
            tried.set()
            await asyncio.sleep(self._beat_seconds)
            if self._clock().monotonic - self._trimmed.monotonic >= TRIM_SECONDS:
                await self.trim()

    async def trim(self) -> None:
        """Remove rows that are too old or too many; the age is unknown if the clock was just set."""
        before, self._trimmed = self._trimmed, self._clock()
        steady = same_clock(before, self._trimmed)

        def trim(db: sqlite3.Connection) -> None:
            if steady:
                remove_old(db, self.bounds, self._trimmed.at)
            remove_excess(db, self.bounds)

        with suppress(StoreUnavailable):  # the store has logged it
            await self.run(trim)

    def record(self, db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None:
        if (operation := audit_table.OPERATION.get()) and isinstance(detail, dict):
            detail = {"operation": operation, **detail}
        owner = audit_table.append(db, actor, action, detail)
        remove_excess(db, self.bounds, owner)


def _owner(alert: Alert) -> str:
    """Return the owner of a past alert's share: a user where a label names one, else its rule."""
    uid = dict(alert.labels).get("uid")
    return counted_name(f"uid:{uid}") if uid else alert.rule


def _is_disk_full(directory: Path) -> bool:
    try:
        return os.statvfs(directory).f_bavail == 0
    except OSError:
        return False


HISTORY_SECONDS = 300.0


class HistoryPersistence:
    """Writes the history every five minutes. Ticks go on while its series are gathered, at about 0.3 ms each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due = HISTORY_SECONDS
        self._writing: asyncio.Future[None] | None = None

    async def restore(self, history: History, earlier_uses: EarlierUses) -> None:
        """Restore the previous daemon's series for devices and processes that still exist, and its records."""
        with suppress(StoreUnavailable):  # the store has logged it
            history.restore(await self._store.history())
            earlier_uses.restore(await self._store.earlier_uses())

    def advance(self, history: History, earlier_uses: EarlierUses, elapsed: float) -> None:
        """Begin to write when it is due. Waits for nothing."""
        if elapsed >= self._due:
            self._due = elapsed + HISTORY_SECONDS
            self._writing = asyncio.ensure_future(self._write(history, earlier_uses))

    async def close(self, history: History, earlier_uses: EarlierUses) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(history, earlier_uses)

    async def _write(self, history: History, earlier_uses: EarlierUses) -> None:
        series = []
        for each in history.coarse():
            series.append(each)
            await asyncio.sleep(0)
        with suppress(StoreUnavailable):  # the store has logged it; the next write includes it
            await self._store.keep_history(series)
            await self._store.keep_earlier_uses(earlier_uses.records())
