"""Requests for device memory in the store's file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from math import isfinite

from gpumond.facts.alerts import KeptAdmission
from gpumond.store.quota_rows import Transaction
from gpumond.store.rows import Rows, from_text, to_text


class AdmissionRows:
    """The store's table of requests. Both methods raise StoreUnavailable. ``rows`` counts damaged rows."""

    def __init__(self, run: Transaction, rows: Rows) -> None:
        self._run, self._rows = run, rows

    async def admissions(self) -> list[KeptAdmission]:
        """Return the requests in the order of their arrival."""
        query = "SELECT id, body FROM admissions ORDER BY rowid"
        return self._rows.read("admissions", await self._run(lambda db: db.execute(query).fetchall()), _admission)

    async def keep_admissions(self, admissions: Sequence[KeptAdmission]) -> None:
        """Store these requests instead of the previous ones. Returns after the commit."""
        rows = [(each.id, to_text(each)) for each in admissions]

        def keep(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM admissions")
            db.executemany("INSERT INTO admissions VALUES (?, ?)", rows)

        await self._run(keep)


def _admission(id: object, body: object) -> KeptAdmission:
    """Decode a row. Raises ValueError if it is damaged."""
    own = from_text(KeptAdmission, body)
    if own.id != id or own.need_bytes < 1 or not all(map(isfinite, (own.grant_seconds, own.deadline or 0.0))):
        raise ValueError("the id differs from the row's, or a size or time is invalid")
    return own
