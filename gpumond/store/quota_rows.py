"""Quotas that were set over the API, in the store's file."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol, TypeVar

from gpumond.facts.errors import NoSuchQuota, QuotaChanged
from gpumond.store.audit import canonical
from gpumond.store.rows import Rows, rule_body, text

T = TypeVar("T")


class Transaction(Protocol):
    def __call__(self, work: Callable[[sqlite3.Connection], T]) -> Awaitable[T]: ...


class QuotaRows:
    """The store's table of quotas. Every method that changes something returns after the commit, or raises
    StoreUnavailable.

    ``run`` runs a transaction, ``record`` adds an audit entry within it, and ``rows`` counts damaged rows.
    """

    def __init__(
        self, run: Transaction, record: Callable[[sqlite3.Connection, str, str, Any], None], rows: Rows
    ) -> None:
        self._run, self._record, self._rows = run, record, rows

    async def quotas(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return etag and body of each quota, by name."""
        query = "SELECT name, etag, body FROM quotas ORDER BY name"
        return dict(self._rows.read("quotas", await self._run(lambda db: db.execute(query).fetchall()), _quota))

    async def put_quota(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str:
        """Store a quota and return its etag. Raises QuotaChanged if ``if_match`` is given and not the present etag."""
        written = canonical(body)
        etag = sha256(written.encode()).hexdigest()[:16]

        def put(db: sqlite3.Connection) -> str:
            known = _require(db, name, if_match)
            db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?, ?)", (name, etag, written))
            self._record(db, actor, "quota.replace" if known else "quota.create", {"name": name, "body": dict(body)})
            return etag

        return await self._run(put)

    async def delete_quota(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a quota. Raises NoSuchQuota, QuotaChanged."""

        def delete(db: sqlite3.Connection) -> None:
            if _require(db, name, if_match) is None:
                raise NoSuchQuota(f"the store has no quota {name}")
            db.execute("DELETE FROM quotas WHERE name = ?", (name,))
            self._record(db, actor, "quota.delete", {"name": name})

        await self._run(delete)


def _quota(name: object, etag: object, body: object) -> tuple[str, tuple[str, dict[str, Any]]]:
    """Decode a row. Raises TypeError or ValueError if it is damaged."""
    own = rule_body(body)
    if own.get("name") != name:
        raise ValueError("its name differs from the name in its body")
    return text(name), (text(etag), own)


def _require(db: sqlite3.Connection, name: str, if_match: str | None) -> str | None:
    """Return the present etag, None without a quota of that name. Raises QuotaChanged."""
    row = db.execute("SELECT etag FROM quotas WHERE name = ?", (name,)).fetchone()
    known = str(row[0]) if row else None
    if if_match is not None and if_match != known:
        raise QuotaChanged(f"quota {name} has changed: its ETag is {known or 'none, it does not exist'}")
    return known
