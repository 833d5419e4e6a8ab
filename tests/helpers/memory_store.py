"""Store in memory, for the tables of features."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from gpumond.facts.errors import StoreUnavailable
from gpumond.store.database import MIGRATIONS
from gpumond.store.table import RowDecoder

T = TypeVar("T")


class MemoryStore:
    """``full`` makes it refuse changes. ``changes`` counts the transactions that changed something."""

    def __init__(self) -> None:
        self.row_decoder = RowDecoder()
        self.full, self.changes = False, 0
        self.audited: list[tuple[str, str, Any]] = []
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.executescript("".join(MIGRATIONS))

    def __del__(self) -> None:
        self._db.close()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        before, audited = self._db.total_changes, len(self.audited)
        self._db.execute("BEGIN")
        try:
            done = work(self._db)
            changed = self._db.total_changes > before
            if changed and self.full:
                raise StoreUnavailable("the disk is full", full=True)
        except BaseException:
            self._db.execute("ROLLBACK")
            del self.audited[audited:]
            raise
        self._db.execute("COMMIT")
        self.changes += changed
        return done

    def append_audit_entry(self, db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None:
        self.audited.append((actor, action, detail))

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)
        self.audited.append((actor, action, detail))

    def names(self, table: str) -> list[str]:
        """Return the first column of a table, in the order of insertion."""
        return [name for name, *_ in self._db.execute(f"SELECT * FROM {table} ORDER BY rowid")]
