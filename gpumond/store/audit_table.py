"""The audit in the store's file: added to, trimmed, read, verified. All within the transaction under way."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

from gpumond.audit import TRIM, AuditEntry, canonical, follow, verify
from gpumond.store.database import LOCK_SECONDS


def append(db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None:
    """One more entry."""
    last = next(iter(entries(db, 1)), None)
    entry = follow(last, time.time(), actor, action, json.loads(canonical(detail)))
    row = (entry.seq, entry.at, entry.actor, entry.action, canonical(entry.detail), entry.prev_hash, entry.hash)
    db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", row)


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


def count(db: sqlite3.Connection) -> int:
    first, last = _ends(db)
    return last - first + 1


def first_at(db: sqlite3.Connection) -> float | None:
    """When the oldest entry was made."""
    row = db.execute("SELECT at FROM audit ORDER BY seq LIMIT 1").fetchone()
    return float(row[0]) if row else None


def trim_oldest(db: sqlite3.Connection) -> None:
    """Drop the oldest tenth."""
    first, last = _ends(db)
    _trim(db, first + max(1, (last - first) // 10))


def trim_before(db: sqlite3.Connection, at: float) -> None:
    """Drop what comes before the first entry made since then (unix seconds)."""
    young = db.execute("SELECT min(seq) FROM audit WHERE at >= ?", (at,)).fetchone()[0]
    _trim(db, (_ends(db)[1] if young is None else young) - 1)


def _trim(db: sqlite3.Connection, through: int) -> None:
    """Drop the entries up to that one; the chain says so itself. Its newest entry stays, since others follow on it."""
    row = db.execute("SELECT hash FROM audit WHERE seq = ?", (through,)).fetchone()
    if row is None or through >= _ends(db)[1]:
        return
    db.execute("DELETE FROM audit WHERE seq <= ?", (through,))
    append(db, "gpumond", TRIM, {"through": through, "hash": row[0]})


def _ends(db: sqlite3.Connection) -> tuple[int, int]:
    # Of each alone SQLite looks up the end of the index; of both at once it reads every row.
    first, last = db.execute("SELECT (SELECT min(seq) FROM audit), (SELECT max(seq) FROM audit)").fetchone()
    return first or 1, last or 0
