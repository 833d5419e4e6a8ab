"""The audit in the store's file: added to, trimmed, read, verified."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

from gpumond.audit import TRIM, AuditEntry, canonical, follow, verify
from gpumond.store.database import LOCK_SECONDS


def append(db: sqlite3.Connection, actor: str, action: str, detail: Any, *, max_entries: int, max_bytes: int) -> None:
    """One more entry, in the transaction that is under way; the oldest go when there are too many."""
    last = next(iter(entries(db, 1)), None)
    entry = follow(last, time.time(), actor, action, json.loads(canonical(detail)))
    _insert(db, entry)
    first = db.execute("SELECT min(seq) FROM audit").fetchone()[0]
    if entry.seq - first >= max_entries or _size(db) > max_bytes:
        _trim(db, first, entry)


def entries(db: sqlite3.Connection, limit: int) -> list[AuditEntry]:
    """The newest, oldest first; all if ``limit`` is negative."""
    columns = "seq, at, actor, action, detail, prev_hash, hash"
    rows = db.execute(f"SELECT {columns} FROM audit ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
    return [
        AuditEntry(seq, at, actor, action, json.loads(detail), prev_hash, own_hash)
        for seq, at, actor, action, detail, prev_hash, own_hash in reversed(rows)
    ]


def verify_audit(path: Path) -> list[str]:
    """What is wrong with the audit in a store's file; empty if it holds. Works beside a running daemon."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_SECONDS)
        try:
            db.execute("BEGIN")
            found = entries(db, -1)
            counted = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        return [f"{path} cannot be read: {error}"]
    problems = verify(found)
    last = found[-1].seq if found else 0
    if counted and counted[0] > last:
        problems.append(f"entries {last + 1} to {counted[0]} are missing at the end")
    return problems


def _trim(db: sqlite3.Connection, first: int, last: AuditEntry) -> None:
    """Drop the oldest tenth; the chain says so itself."""
    through = first + max(1, (last.seq - first) // 10)
    row = db.execute("SELECT hash FROM audit WHERE seq = ?", (through,)).fetchone()
    if row is None or through >= last.seq:
        return
    db.execute("DELETE FROM audit WHERE seq <= ?", (through,))
    db.execute("DELETE FROM receipts WHERE seq <= (SELECT min(seq) + (max(seq) - min(seq)) / 10 FROM receipts)")
    _insert(db, follow(last, time.time(), "gpumond", TRIM, {"through": through, "hash": row[0]}))


def _insert(db: sqlite3.Connection, entry: AuditEntry) -> None:
    row = (entry.seq, entry.at, entry.actor, entry.action, canonical(entry.detail), entry.prev_hash, entry.hash)
    db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _size(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
