"""Quotas that were set over the API, in the store's file. All within the open transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from gpumond.errors import NoSuchQuota, QuotaChanged
from gpumond.store.audit_chain import canonical
from gpumond.store.rows import rule_body, text


def rows(db: sqlite3.Connection) -> list[Any]:
    return db.execute("SELECT name, etag, body FROM quotas ORDER BY name").fetchall()


def quota(name: object, etag: object, body: object) -> tuple[str, tuple[str, dict[str, Any]]]:
    """Decode a row. Raises TypeError or ValueError if it is damaged."""
    own = rule_body(body)
    if own.get("name") != name:
        raise ValueError("its name differs from the name in its body")
    return text(name), (text(etag), own)


def put(db: sqlite3.Connection, name: str, body: Mapping[str, Any], if_match: str | None) -> tuple[str, bool]:
    """Store a quota. Return its etag, and True if it replaces another. Raises QuotaChanged."""
    known = _require(db, name, if_match)
    written = canonical(body)
    etag = sha256(written.encode()).hexdigest()[:16]
    db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?, ?)", (name, etag, written))
    return etag, known is not None


def delete(db: sqlite3.Connection, name: str, if_match: str | None) -> None:
    """Delete a quota. Raises NoSuchQuota, QuotaChanged."""
    if _require(db, name, if_match) is None:
        raise NoSuchQuota(f"the store has no quota {name}")
    db.execute("DELETE FROM quotas WHERE name = ?", (name,))


def _require(db: sqlite3.Connection, name: str, if_match: str | None) -> str | None:
    row = db.execute("SELECT etag FROM quotas WHERE name = ?", (name,)).fetchone()
    known = str(row[0]) if row else None
    if known is not None and if_match is not None and if_match != known:
        raise QuotaChanged(f"quota {name} has changed: its ETag is {known}")
    if known is None and if_match is not None:
        raise QuotaChanged(f"quota {name} does not exist, and has no ETag")
    return known
