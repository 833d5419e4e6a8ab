"""Baselines in the store's file: each with the last measurement that was compared with it. All within the open
transaction."""

from __future__ import annotations

import sqlite3
from typing import Any, Literal

from gpumond.facts.messages import from_json, to_json
from gpumond.features.baselines.statistics import Baseline
from gpumond.store.rows import text

Side = Literal["before", "after"]
MAX_BASELINES = 100
MAX_BYTES = 8 * 1024**2


def has_room(db: sqlite3.Connection) -> bool:
    count, size = db.execute("SELECT count(*), total(length(body)) FROM baselines").fetchone()
    return bool(count < 2 * MAX_BASELINES and size < MAX_BYTES)


def put(db: sqlite3.Connection, side: Side, baseline: Baseline) -> None:
    """Store a baseline; a new ``before`` deletes the recording that was compared with the old one."""
    if side == "before":
        delete(db, baseline.name)
    row = (baseline.name, side, to_json(baseline).decode())
    db.execute("INSERT OR REPLACE INTO baselines VALUES (?, ?, ?)", row)


def delete(db: sqlite3.Connection, name: str) -> bool:
    """Delete a baseline and its comparison; False if there was none."""
    return db.execute("DELETE FROM baselines WHERE name = ?", (name,)).rowcount > 0


def rows(db: sqlite3.Connection, side: Side, name: str | None = None) -> list[Any]:
    """Return all rows of one side, or the one of that name; in order of names."""
    query = "SELECT body FROM baselines WHERE side = ? AND (? IS NULL OR name = ?) ORDER BY name"
    return db.execute(query, (side, name, name)).fetchall()


def baseline(body: object) -> Baseline:
    """Decode a row. Raises TypeError, ValueError or ProtocolError if it is damaged or of another version."""
    return from_json(Baseline, text(body).encode())
