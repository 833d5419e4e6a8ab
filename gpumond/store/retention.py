"""What is removed from the store: what is older than is asked for, and the oldest of what is too much.

The audit is a chain: what goes from it goes from its beginning, and an entry says so.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from gpumond.records import Heartbeat
from gpumond.store import audit_table

DAY_SECONDS = 86400.0
LATE_RATIO = 1.05
"""The audit is trimmed when its first entry is so much older than the retention, and then to the retention: not at
every entry that grows too old, since each trim is an entry itself."""

CLOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """``max_bytes`` is of the whole file."""

    seconds: float = 90 * DAY_SECONDS
    max_bytes: int = 64 * 1024**2
    max_entries: int = 100_000
    max_receipts: int = 10_000
    max_past_alerts: int = 10_000


def same_clock(before: Heartbeat, now: Heartbeat) -> bool:
    """Whether nobody set the clock in between."""
    return abs((now.at - before.at) - (now.monotonic - before.monotonic)) <= CLOCK_SECONDS


def remove_old(db: sqlite3.Connection, bounds: Bounds, now: float) -> None:
    """What is older than the bounds allow, in the transaction that is under way."""
    cut = now - bounds.seconds
    for table in ("receipts", "past_alerts"):
        db.execute(f"DELETE FROM {table} WHERE at < ?", (cut,))
    if (first := audit_table.first_at(db)) is not None and first < now - LATE_RATIO * bounds.seconds:
        audit_table.trim_before(db, cut)


def remove_excess(db: sqlite3.Connection, bounds: Bounds) -> None:
    """The oldest, where there is more than the bounds allow, in the transaction that is under way."""
    for table, most in (("receipts", bounds.max_receipts), ("past_alerts", bounds.max_past_alerts)):
        db.execute(f"DELETE FROM {table} WHERE seq <= (SELECT max(seq) FROM {table}) - ?", (most,))
    large = _size(db) > bounds.max_bytes
    if large:
        for table in ("receipts", "past_alerts"):
            oldest = f"SELECT min(seq) + (max(seq) - min(seq)) / 10 FROM {table}"
            db.execute(f"DELETE FROM {table} WHERE seq <= ({oldest})")
    if large or audit_table.count(db) > bounds.max_entries:
        audit_table.trim_oldest(db)


def _size(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
