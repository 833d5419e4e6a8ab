"""Rules and overrides of rules in the store's file. All within the open transaction."""

from __future__ import annotations

import sqlite3
from typing import Any

from gpumond.facts.errors import NoSuchRule, RuleChanged
from gpumond.store import rows as decode
from gpumond.store.rows import text

Etag = str


def rules(db: sqlite3.Connection) -> list[Any]:
    return db.execute("SELECT name, etag, body FROM rules ORDER BY name").fetchall()


def rule(name: object, etag: object, body: object) -> tuple[str, tuple[Etag, dict[str, Any]]]:
    """Decode a row of a rule. Raises ValueError or TypeError if it is damaged."""
    own = decode.rule_body(body)
    if own.get("name", name) != name:
        raise ValueError("its name differs from the name in its body")
    return text(name), (text(etag), own)


def put(db: sqlite3.Connection, name: str, etag: Etag, body: str, if_match: Etag | None) -> bool:
    """Store a rule; return True if it replaces one. Raises RuleChanged."""
    known = _etag(db, name)
    _require(name, known, if_match)
    db.execute("INSERT OR REPLACE INTO rules VALUES (?, ?, ?)", (name, etag, body))
    return known is not None


def delete(db: sqlite3.Connection, name: str, if_match: Etag | None) -> None:
    """Delete a rule. Raises NoSuchRule or RuleChanged."""
    known = _etag(db, name)
    if known is None:
        raise NoSuchRule(f"the store has no rule {name}")
    _require(name, known, if_match)
    db.execute("DELETE FROM rules WHERE name = ?", (name,))


def overrides(db: sqlite3.Connection) -> list[Any]:
    return db.execute("SELECT name, body FROM rule_overrides ORDER BY name").fetchall()


def override(name: object, body: object) -> tuple[str, dict[str, Any]]:
    """Decode a row of an override. Raises ValueError or TypeError if it is damaged."""
    return text(name), decode.rule_body(body)


def put_override(db: sqlite3.Connection, name: str, body: str) -> None:
    db.execute("INSERT OR REPLACE INTO rule_overrides VALUES (?, ?)", (name, body))


def delete_override(db: sqlite3.Connection, name: str) -> None:
    """Delete an override. Raises NoSuchRule."""
    if not db.execute("DELETE FROM rule_overrides WHERE name = ?", (name,)).rowcount:
        raise NoSuchRule(f"the store has no override of the rule {name}")


def _etag(db: sqlite3.Connection, name: str) -> Etag | None:
    row = db.execute("SELECT etag FROM rules WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row else None


def _require(name: str, known: Etag | None, if_match: Etag | None) -> None:
    if if_match is not None and if_match != known:
        raise RuleChanged(f"rule {name} has changed: its ETag is {known or 'none, it does not exist'}")
