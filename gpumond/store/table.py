"""A table of named values in the store. Each feature declares its own, and keeps its values in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Generic, Protocol, TypeVar

from gpumond.facts.errors import DefinitionChanged
from gpumond.store.audit import canonical
from gpumond.store.rows import Rows, from_text, text

R = TypeVar("R")
V = TypeVar("V")


class Transactions(Protocol):
    """What a table needs of `Store`. ``run`` raises StoreUnavailable."""

    @property
    def rows(self) -> Rows: ...
    def run(self, work: Callable[[sqlite3.Connection], R]) -> Awaitable[R]: ...
    def record(self, db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Actions:
    """Actions of a table's changes in the audit. Changes with an empty one are not recorded."""

    create: str = ""
    replace: str = ""
    delete: str = ""


@dataclass(frozen=True, slots=True)
class Row(Generic[V]):
    """A value and its name. ``etag`` is empty if the table has none."""

    name: str
    value: V
    etag: str = ""


def etag_of(value: Any) -> str:
    """Return the etag of a value: it changes with the value's JSON."""
    return sha256(canonical(value).encode()).hexdigest()[:16]


class Table(Generic[V]):
    """Values of the type ``kind``, a dataclass or a dictionary, by name.

    ``key`` is the column of the name: ``id`` where rows come in the order of their arrival, else they come in that of
    their names. ``part``: a second column of the key, and its value in all rows of this table. A row that is not
    ``valid``, or whose value has another name, is damaged. Every method raises StoreUnavailable, and one that changes
    something returns after the commit.
    """

    def __init__(
        self,
        store: Transactions,
        name: str,
        kind: type[V],
        *,
        key: str = "name",
        part: tuple[str, str] | None = None,
        etag: bool = False,
        valid: Callable[[V], bool] = lambda value: True,
        actions: Actions = Actions(),
    ) -> None:
        self._store, self._name, self._kind, self._key = store, name, kind, key
        self._valid, self._actions, self._etag = valid, actions, etag
        self._part = dict([part] if part else [])

    async def rows(self, name: str | None = None) -> list[Row[V]]:
        """Return all rows that can be read, or the one of this name."""
        keys = self._part if name is None else {self._key: name, **self._part}
        where = " AND ".join(f"{column} = ?" for column in keys) or "1"
        etag, order = "etag" if self._etag else "''", "rowid" if self._key == "id" else self._key
        query = f"SELECT {self._key}, {etag}, body FROM {self._name} WHERE {where} ORDER BY {order}"
        found = await self._store.run(lambda db: db.execute(query, tuple(keys.values())).fetchall())
        return self._store.rows.read(self._name, found, self._decode)

    async def size(self) -> tuple[int, int]:
        """Return the number of rows and the length of their texts, those of other parts included."""
        query = f"SELECT count(*), total(length(body)) FROM {self._name}"
        rows, length = await self._store.run(lambda db: db.execute(query).fetchone())
        return int(rows), int(length)

    async def put(
        self, name: str, value: V, actor: str = "", if_match: str | None = None, removed: Iterable[str] = ()
    ) -> str:
        """Store a value after deleting those named ``removed``, and return its etag.

        Raises DefinitionChanged if ``if_match`` is given and is not the present etag.
        """
        plain = _plain(value)
        detail = {"name": name, "body": plain} if isinstance(value, dict) else plain
        etag, row = etag_of(plain), self._row(name, plain)

        def put(db: sqlite3.Connection) -> str:
            present = self._present(db, name)
            self._require(name, present, if_match)
            db.executemany(f"DELETE FROM {self._name} WHERE {self._key} = ?", ((other,) for other in removed))
            self._insert(db, [row])
            if action := self._actions.create if present is None else self._actions.replace:
                self._store.record(db, actor, action, detail)
            return etag

        return await self._store.run(put)

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> bool:
        """Delete a value, in all parts; False if there is none. Raises DefinitionChanged."""

        def delete(db: sqlite3.Connection) -> bool:
            present = self._present(db, name)
            if present is None:
                return False
            self._require(name, present, if_match)
            db.execute(f"DELETE FROM {self._name} WHERE {self._key} = ?", (name,))
            if self._actions.delete:
                self._store.record(db, actor, self._actions.delete, {"name": name})
            return True

        return await self._store.run(delete)

    async def replace(self, values: Iterable[V]) -> None:
        """Store these values instead of all present ones, without an entry in the audit."""
        rows = [self._row(str(getattr(value, self._key)), _plain(value)) for value in values]

        def replace(db: sqlite3.Connection) -> None:
            db.execute(f"DELETE FROM {self._name}")
            self._insert(db, rows)

        await self._store.run(replace)

    def _row(self, name: str, plain: Any) -> dict[str, str]:
        etag = {"etag": etag_of(plain)} if self._etag else {}
        return {self._key: name, "body": canonical(plain)} | self._part | etag

    def _insert(self, db: sqlite3.Connection, rows: list[dict[str, str]]) -> None:
        for row in rows:
            columns, places = ", ".join(row), ", ".join("?" * len(row))
            db.execute(f"INSERT OR REPLACE INTO {self._name} ({columns}) VALUES ({places})", tuple(row.values()))

    def _present(self, db: sqlite3.Connection, name: str) -> str | None:
        """Return the etag of a value, which is empty in a table without etags; None without such a value."""
        etag = "etag" if self._etag else "''"
        row = db.execute(f"SELECT {etag} FROM {self._name} WHERE {self._key} = ?", (name,)).fetchone()
        return str(row[0]) if row else None

    def _require(self, name: str, present: str | None, if_match: str | None) -> None:
        if if_match is not None and if_match != present:
            what = self._name.removesuffix("s")
            raise DefinitionChanged(f"{what} {name} has changed: its ETag is {present or 'none, it does not exist'}")

    def _decode(self, name: object, etag: object, body: object) -> Row[V]:
        """Decode a row. Raises ValueError or TypeError if it is damaged."""
        value = from_text(self._kind, body)
        stated = value.get(self._key, name) if isinstance(value, dict) else getattr(value, self._key)
        if stated != name:
            raise ValueError("its name differs from the name in its body")
        if not self._valid(value):
            raise ValueError("a part of it is missing or invalid")
        return Row(text(name), value, text(etag))


def _plain(value: Any) -> Any:
    return value if isinstance(value, dict) else asdict(value)
