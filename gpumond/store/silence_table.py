"""Silences in the store's file. All within the open transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from math import isfinite
from typing import Any

from gpumond.facts.frame import Silence
from gpumond.store.rows import from_text, to_text


def put(db: sqlite3.Connection, silence: Silence, removed: Iterable[str]) -> None:
    """Store a silence, and delete those with the ids ``removed``."""
    db.execute("INSERT OR REPLACE INTO silences VALUES (?, ?)", (silence.id, to_text(silence)))
    db.executemany("DELETE FROM silences WHERE id = ?", ((id,) for id in removed))


def rows(db: sqlite3.Connection) -> list[Any]:
    return db.execute("SELECT id, body FROM silences ORDER BY rowid").fetchall()


def silence(id: object, body: object) -> Silence:
    """Decode a row. Raises ValueError if it is damaged."""
    own = from_text(Silence, body)
    if own.id != id or not all(map(isfinite, (own.starts_at, own.ends_at, own.created_at))):
        raise ValueError("another id, or a time that is not a number")
    return own
