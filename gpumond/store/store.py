"""Persistent state: rules and overrides, silences, audit log, receipts, past and active alerts, undelivered
notifications, requests for memory, history, baselines.

SQLite in WAL mode with synchronous=FULL: an acknowledged change is on the disk. One thread writes, so the event
loop waits for no disk. A store that cannot commit reports it (``writable``, ``problem``), rejects changes, and tries
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
from gpumond.facts.alerts import ClockTimes, Notification, StoredAlert
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.frame import Alert
from gpumond.facts.pools import Receipt
from gpumond.facts.snapshot import Fault
from gpumond.facts.units import DAY_SECONDS
from gpumond.host.peer import rate_limit_name
from gpumond.store import audit as audit_table
from gpumond.store.audit import ADMINISTRATORS, AuditEntry, canonical_json
from gpumond.store.database import DaemonThreadExecutor, Database
from gpumond.store.table import RowDecoder, coarse_series_text, decode_notification, from_text, require_text, to_text
from gpumond.tick.history import CoarseSeries, History

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
OPEN_TIMEOUT_SECONDS = 2.0
TRIM_INTERVAL_SECONDS = 600.0

CLOCK_TOLERANCE_SECONDS = 60.0
ROW_OVERHEAD_BYTES = 300
"""Bytes of a row without its longest column."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the store; ``max_bytes`` is the limit of the whole file."""

    max_age_seconds: float = 90 * DAY_SECONDS
    max_bytes: int = 64 * 1024**2
    max_audit_entries: int = 100_000
    max_audit_entries_of_user: int = 5_000
    max_receipts: int = 10_000
    max_past_alerts: int = 10_000


def is_same_clock(before: ClockTimes, now: ClockTimes) -> bool:
    """Return True if the clock was not set in between."""
    return abs((now.at - before.at) - (now.monotonic - before.monotonic)) <= CLOCK_TOLERANCE_SECONDS


def _remove_old(db: sqlite3.Connection, limits: StoreLimits, now: float) -> None:
    """Remove rows that are older than the limits allow, in the open transaction."""
    oldest_at = now - limits.max_age_seconds
    for table in ("receipts", "past_alerts"):
        db.execute(f"DELETE FROM {table} WHERE at < ?", (oldest_at,))
    audit_table.remove_old(db, oldest_at)


def _remove_excess(db: sqlite3.Connection, limits: StoreLimits, counted_user: str = ADMINISTRATORS) -> None:
    """Remove rows beyond the limits, in the open transaction. ``counted_user`` has the newest audit entry."""
    max_audit_entries = limits.max_audit_entries if counted_user == ADMINISTRATORS else limits.max_audit_entries_of_user
    if audit_table.count_entries(db, counted_user) > max_audit_entries:
        audit_table.remove_oldest_tenth(db, counted_user)
    for table, max_rows in (("receipts", limits.max_receipts), ("past_alerts", limits.max_past_alerts)):
        while (excess := _count_rows(db, table) - max_rows) > 0:
            _remove_oldest(db, table, _largest_owner(db, table, "count(*)"), excess)
    if _file_bytes(db) > limits.max_bytes:
        _shrink_tables(db, limits.max_bytes)


def _shrink_tables(db: sqlite3.Connection, max_bytes: int) -> None:
    """Bring each table down to its share of the file: half for the administrators' audit, an eighth for the users',
    for receipts and for alerts that are over. If none has more, what fills the file is bounded elsewhere."""
    while _table_bytes(db, "audit WHERE owner = 'administrators'", "detail") > max_bytes // 2:
        audit_table.remove_oldest_tenth(db, ADMINISTRATORS)
    while _table_bytes(db, "audit WHERE owner <> 'administrators'", "detail") > max_bytes // 8:
        audit_table.remove_oldest_tenth(db, audit_table.user_with_most_bytes(db))
    for table in ("receipts", "past_alerts"):
        while _table_bytes(db, table, "body") > max_bytes // 8:
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


def _count_rows(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _table_bytes(db: sqlite3.Connection, table: str, column: str) -> int:
    return int(db.execute(f"SELECT total(length({column}) + {ROW_OVERHEAD_BYTES}) FROM {table}").fetchone()[0])


def _file_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _clock_times() -> ClockTimes:
    return ClockTimes(time.time(), time.monotonic())


class Store:
    """One file. Every method that changes something returns after the commit, or raises StoreUnavailable.

    ``limits`` can be replaced at any time. ``clock`` returns Unix seconds, and seconds of a monotonic clock.
    """

    def __init__(
        self,
        path: Path,
        limits: StoreLimits = StoreLimits(),
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        clock: Callable[[], ClockTimes] = _clock_times,
    ) -> None:
        self.path, self.limits = path, limits
        self._clock = clock
        self.writable = False
        self.problem = ""
        self._corrupt_files: tuple[str, ...] = ()
        self._heartbeat_seconds = heartbeat_seconds
        self._trimmed_at = clock()
        self._executor = DaemonThreadExecutor("gpumond-store")
        self._database = Database(path)
        self.row_decoder = RowDecoder()
        self._heartbeats: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open or create the file. Never raises: a store that cannot be opened is not ``writable``, and is
        opened later.
        """
        is_tried = asyncio.Event()
        self._heartbeats = asyncio.create_task(self._write_heartbeats(is_tried))
        try:
            await asyncio.wait_for(is_tried.wait(), OPEN_TIMEOUT_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            self.problem = f"the store {self.path} takes too long to open"
            log.error("%s; the daemon continues without it", self.problem)

    async def close(self, timeout_seconds: float = 10.0) -> None:
        """Wait up to ``timeout_seconds`` for pending writes: a disk that hangs does not block the daemon's end."""
        if self._heartbeats:
            self._heartbeats.cancel()
        closed = asyncio.get_running_loop().run_in_executor(self._executor, self._database.close)
        if not (await asyncio.wait({closed}, timeout=timeout_seconds))[0]:
            log.error("the store %s doesn't respond; data that hasn't been written is lost", self.path)
        self._executor.shutdown()

    def faults(self) -> tuple[Fault, ...]:
        """Return the store's problems as faults for the snapshot."""
        faults = [
            Fault("store", "corrupt", None, f"{name} couldn't be read and was renamed in {self.path.parent}")
            for name in self._corrupt_files
        ]
        faults += self.row_decoder.faults()
        if not self.writable and self.problem:
            faults.append(Fault("store", "not_writable", None, self.problem))
        return tuple(faults)

    def add_skipped_rows(self, table: str, rows: int) -> None:
        """Report further rows that could be read but not used."""
        self.row_decoder.set_skipped_rows(table, self.row_decoder.skipped_rows(table) + rows)

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        """Add an audit entry; ``detail`` is any JSON value."""
        await self.run(lambda db: self.append_audit_entry(db, actor, action, detail))

    async def audit_entries(
        self, limit: int = 1000, include_users: bool = True, operation: str | None = None
    ) -> list[AuditEntry]:
        """Return the newest entries, oldest first; without ``include_users``, only the administrators'.

        ``operation``: only entries of the operation with this id.
        """
        return await self.run(lambda db: audit_table.newest_entries(db, limit, include_users, operation))

    async def add_receipts(self, receipts: Iterable[Receipt]) -> None:
        rows = [(receipt.started_at, to_text(receipt), rate_limit_name(receipt.requested_by)) for receipt in receipts]

        def add(db: sqlite3.Connection) -> None:
            db.executemany("INSERT INTO receipts (at, body, owner) VALUES (?, ?, ?)", rows)
            _remove_excess(db, self.limits)

        await self.run(add)

    async def receipts(self, limit: int = 1000) -> list[Receipt]:
        """Return the newest receipts, oldest first."""
        return (await self._values("receipts", Receipt, f"ORDER BY seq DESC LIMIT {limit:d}"))[::-1]

    def store_alerts(
        self, alerts: Iterable[StoredAlert], notifications: Sequence[Notification], ended: Sequence[Alert] = ()
    ) -> Awaitable[None]:
        """Store all present alerts, the new notifications, and the alerts that have ended, in one transaction.

        The transaction precedes later changes once this returns, awaited or not. It is also a heartbeat: without it, an
        alert that has just fired would be younger than its ``for`` to the daemon that resumes it.
        """
        current = tuple(alerts)

        def keep(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM alerts")
            db.executemany("INSERT INTO alerts VALUES (?)", ((to_text(alert),) for alert in current))
            queued = ((each.receiver, each.seq, each.kind, to_text(each.alert)) for each in notifications)
            db.executemany("INSERT OR REPLACE INTO notices VALUES (?, ?, ?, ?)", queued)
            past = ((alert.resolved_at or 0.0, to_text(alert), _past_alert_owner(alert)) for alert in ended)
            db.executemany("INSERT INTO past_alerts (at, body, owner) VALUES (?, ?, ?)", past)
            _remove_excess(db, self.limits)
            self._record_heartbeat(db)

        return self._result(self._submit(keep))

    async def stored_alerts(self) -> tuple[list[StoredAlert], ClockTimes | None]:
        """Return the stored alerts, and the last activity of the daemon that stored them."""
        return await self._values("alerts", StoredAlert), self._database.last_activity

    async def past_alerts(self, limit: int = 1000) -> list[Alert]:
        """Return the newest alerts that have ended, oldest first."""
        return (await self._values("past_alerts", Alert, f"ORDER BY seq DESC LIMIT {limit:d}"))[::-1]

    async def store_history(self, history: Iterable[CoarseSeries]) -> None:
        """Store the history, replacing the previous one."""
        await self._replace("history", map(coarse_series_text, history))

    async def history(self) -> list[CoarseSeries]:
        return await self._values("history", CoarseSeries)

    async def store_earlier_uses(self, earlier_uses: Iterable[EarlierUse]) -> None:
        """Store what programs did before, replacing the previous records."""
        await self._replace("pasts", map(to_text, earlier_uses))

    async def earlier_uses(self) -> list[EarlierUse]:
        return await self._values("pasts", EarlierUse)

    async def _values(self, table: str, kind: type[T], order: str = "") -> list[T]:
        """Return the values of a table's rows that can be read."""
        rows = await self.run(lambda db: db.execute(f"SELECT body FROM {table} {order}").fetchall())
        return self.row_decoder.read(table, rows, partial(from_text, kind))

    async def _replace(self, table: str, texts: Iterable[str]) -> None:
        """Store these rows instead of the present ones. The store's thread encodes them."""

        def replace(db: sqlite3.Connection) -> None:
            db.execute(f"DELETE FROM {table}")
            db.executemany(f"INSERT INTO {table} VALUES (?)", ((text,) for text in texts))

        await self.run(replace)

    async def record_delivery(self, notifications: Sequence[Notification], accepted: bool) -> None:
        """Remove notifications from the queue; if ``accepted``, their receiver knows their alerts."""

        def deliver(db: sqlite3.Connection) -> None:
            for each in notifications:
                db.execute("DELETE FROM notices WHERE receiver = ? AND seq = ?", (each.receiver, each.seq))
                key = (each.receiver, canonical_json(each.alert.labels))
                if each.kind == "resolved":
                    db.execute("DELETE FROM told WHERE receiver = ? AND labels = ?", key)
                elif accepted:
                    db.execute("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", (*key, to_text(each.alert)))

        await self.run(deliver)

    async def undelivered_notifications(
        self, receivers: Iterable[str]
    ) -> tuple[list[Notification], list[tuple[str, Alert]]]:
        """Return queued notifications in order, and the firing alerts that each receiver knows; other
        receivers' are deleted.
        """
        names = tuple(receivers)
        placeholders = f"({','.join('?' * len(names))})"

        def load(db: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
            for table in ("notices", "told"):
                db.execute(f"DELETE FROM {table} WHERE receiver NOT IN {placeholders}", names)
            return (
                db.execute("SELECT receiver, seq, kind, alert FROM notices ORDER BY receiver, seq").fetchall(),
                db.execute("SELECT receiver, alert FROM told").fetchall(),
            )

        notifications, known_alerts = await self.run(load)
        return (
            self.row_decoder.read("notices", notifications, decode_notification),
            self.row_decoder.read(
                "told", known_alerts, lambda receiver, body: (require_text(receiver), from_text(Alert, body))
            ),
        )

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._result(self._submit(work))

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[tuple[T, bool]]:
        run = copy_context().run
        return asyncio.get_running_loop().run_in_executor(self._executor, run, self._database.transaction, work)

    async def _result(self, submitted: asyncio.Future[tuple[T, bool]]) -> T:
        try:
            result, changed = await submitted
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:  # a damaged file can raise any of them
            raise self._mark_unwritable(error) from None
        if changed:  # a read says nothing about whether writes succeed
            if not self.writable:
                log.info("the store %s is writable", self.path)
            self.writable, self.problem = True, ""
        return result

    def _mark_unwritable(self, error: Exception) -> StoreUnavailable:
        is_full = "full" in str(error) or _is_disk_full(self.path.parent)
        problem = f"the store {self.path} can't be written: {error}{' (the disk is full)' if is_full else ''}"
        if problem != self.problem:
            log.error("%s; monitoring and alerting continue, changes are refused", problem)
        self.writable, self.problem = False, problem
        return StoreUnavailable(problem, is_full)

    async def _write_heartbeat(self) -> None:
        def beat(db: sqlite3.Connection) -> tuple[str, ...]:
            self._record_heartbeat(db)
            return self._database.corrupt_files()

        with suppress(StoreUnavailable):  # the store has logged it
            self._corrupt_files = await self.run(beat)

    def _record_heartbeat(self, db: sqlite3.Connection) -> None:
        now = self._clock()
        db.execute("INSERT OR REPLACE INTO heartbeat VALUES (1, ?, ?)", (now.at, now.monotonic))

    async def _write_heartbeats(self, is_tried: asyncio.Event) -> None:
        while True:
            await self._write_heartbeat()
            is_tried.set()
            await asyncio.sleep(self._heartbeat_seconds)
            if self._clock().monotonic - self._trimmed_at.monotonic >= TRIM_INTERVAL_SECONDS:
                await self.trim()

    async def trim(self) -> None:
        """Remove rows that are too old or too many; the age is unknown if the clock was just set."""
        before, self._trimmed_at = self._trimmed_at, self._clock()
        is_steady = is_same_clock(before, self._trimmed_at)

        def trim(db: sqlite3.Connection) -> None:
            if is_steady:
                _remove_old(db, self.limits, self._trimmed_at.at)
            _remove_excess(db, self.limits)

        with suppress(StoreUnavailable):  # the store has logged it
            await self.run(trim)

    def append_audit_entry(self, db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None:
        if (operation := audit_table.CURRENT_OPERATION_ID.get()) and isinstance(detail, dict):
            detail = {"operation": operation, **detail}
        counted_user = audit_table.append_entry(db, actor, action, detail)
        _remove_excess(db, self.limits, counted_user)


def _past_alert_owner(alert: Alert) -> str:
    """Return the owner of a past alert's share: a user where a label names one, else its rule."""
    uid = dict(alert.labels).get("uid")
    return rate_limit_name(f"uid:{uid}") if uid else alert.rule


def _is_disk_full(directory: Path) -> bool:
    try:
        return os.statvfs(directory).f_bavail == 0
    except OSError:
        return False


HISTORY_INTERVAL_SECONDS = 300.0


class HistoryPersistence:
    """Writes the history every five minutes. Ticks go on while its series are gathered, at about 0.3 ms each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due_at = HISTORY_INTERVAL_SECONDS
        self._writing: asyncio.Future[None] | None = None

    async def restore(self, history: History, earlier_uses: EarlierUses) -> None:
        """Restore the previous daemon's series for devices and processes that still exist, and its records."""
        with suppress(StoreUnavailable):  # the store has logged it
            history.restore(await self._store.history())
            earlier_uses.restore(await self._store.earlier_uses())

    def advance(self, history: History, earlier_uses: EarlierUses, now: float) -> None:
        """Begin to write when it is due. Waits for nothing."""
        if now >= self._due_at:
            self._due_at = now + HISTORY_INTERVAL_SECONDS
            self._writing = asyncio.ensure_future(self._write(history, earlier_uses))

    async def close(self, history: History, earlier_uses: EarlierUses) -> None:
        if self._writing is not None:
            await self._writing
        await self._write(history, earlier_uses)

    async def _write(self, history: History, earlier_uses: EarlierUses) -> None:
        series = []
        for each in history.coarse_series():
            series.append(each)
            await asyncio.sleep(0)
        with suppress(StoreUnavailable):  # the store has logged it; the next write includes it
            await self._store.store_history(series)
            await self._store.store_earlier_uses(earlier_uses.records())
