"""Tables of named values in the store, and registries of what the configuration file and the API both define.

Rows are decoded one by one: a damaged row is skipped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import TypeAdapter

from gpumond.facts.alerts import Notification, NotificationKind
from gpumond.facts.errors import (
    EntryChanged,
    EntryConflict,
    NoSuchEntry,
    ProtocolError,
    StoreUnavailable,
    did_you_mean,
)
from gpumond.facts.frame import Alert
from gpumond.facts.snapshot import Fault
from gpumond.store.audit import canonical_json
from gpumond.tick.history import CoarseSeries

log = logging.getLogger(__name__)
T = TypeVar("T")


class RowDecoder:
    """Decoder that counts undecodable rows by table."""

    def __init__(self) -> None:
        self._skipped_rows: dict[str, int] = {}

    def read(self, table: str, rows: Iterable[Any], decode: Callable[..., T]) -> list[T]:
        """Decode rows. ``decode`` takes a row's columns; damaged ones raise ValueError, TypeError or ProtocolError."""
        values: list[T] = []
        skipped = 0
        for row in rows:
            try:
                values.append(decode(*row))
            except (ValueError, TypeError, ProtocolError, RecursionError, OverflowError) as error:
                skipped += 1
                log.error("a row of the table %s can't be read and is skipped: %.200s", table, _one_line(error))
        self.set_skipped_rows(table, skipped)
        return values

    def set_skipped_rows(self, table: str, rows: int) -> None:
        self._skipped_rows[table] = rows

    def skipped_rows(self, table: str) -> int:
        return self._skipped_rows.get(table, 0)

    def faults(self) -> list[Fault]:
        return [
            Fault("store", "row_unreadable", None, f"{rows} of the table {table} can't be read and are skipped")
            for table, rows in self._skipped_rows.items()
            if rows
        ]


def require_text(value: object) -> str:
    """Return the text. Raises TypeError or ValueError for a value that isn't UTF-8 text."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} isn't text")
    value.encode()
    return value


def decode_notification(receiver: object, seq: object, kind: object, body: object) -> Notification:
    key = type_adapter(tuple[str, int, NotificationKind]).validate_python((receiver, seq, kind))
    return Notification(key[0], key[1], key[2], from_text(Alert, body))


def from_text(kind: type[T], body: object) -> T:
    """Decode JSON in UTF-8. Raises ValueError if it is not a value of this type; keys that this version does not know
    are left out, since a newer one may have written them.
    """
    value: T = type_adapter(kind).validate_json(body)  # type: ignore[arg-type]  # it raises ValueError for other values
    return value


@cache
def type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the decoder of a type, made at the first use: most stores contain few kinds of rows at the start."""
    return TypeAdapter(kind)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def to_text(value: Any) -> str:
    return canonical_json(asdict(value))


def coarse_series_text(series: CoarseSeries) -> str:
    """Encode like ``to_text``, without a copy of each number."""
    return canonical_json({field.name: getattr(series, field.name) for field in fields(series)})


R = TypeVar("R")
V = TypeVar("V")


class Transactions(Protocol):
    """What a table needs of `Store`. ``run`` raises StoreUnavailable."""

    @property
    def row_decoder(self) -> RowDecoder: ...
    def run(self, work: Callable[[sqlite3.Connection], R]) -> Awaitable[R]: ...
    def append_audit_entry(self, db: sqlite3.Connection, actor: str, action: str, detail: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class AuditActions:
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
    return sha256(canonical_json(value).encode()).hexdigest()[:16]


class Table(Generic[V]):
    """Values of the type ``kind``, a dataclass or a dictionary, by name.

    ``key`` is the column of the name: ``id`` where rows come in the order of their arrival, else they come in the order
    of their names. ``second_key``: a second column of the key, and its value in all rows of this table. A row whose
    value is not valid (``is_valid``) or has another name is damaged. Every method raises StoreUnavailable, and one that
    changes something returns after the commit.
    """

    def __init__(
        self,
        store: Transactions,
        name: str,
        kind: type[V],
        *,
        key: str = "name",
        second_key: tuple[str, str] | None = None,
        etag: bool = False,
        is_valid: Callable[[V], bool] = lambda value: True,
        actions: AuditActions = AuditActions(),
    ) -> None:
        self._store, self._name, self._kind, self._key = store, name, kind, key
        self._is_valid, self._actions, self._etag = is_valid, actions, etag
        self._second_key = dict([second_key] if second_key else [])

    async def rows(self, name: str | None = None) -> list[Row[V]]:
        """Return all rows that can be read, or the one of this name."""
        keys = self._second_key if name is None else {self._key: name, **self._second_key}
        where = " AND ".join(f"{column} = ?" for column in keys) or "1"
        etag, order = "etag" if self._etag else "''", "rowid" if self._key == "id" else self._key
        query = f"SELECT {self._key}, {etag}, body FROM {self._name} WHERE {where} ORDER BY {order}"
        rows = await self._store.run(lambda db: db.execute(query, tuple(keys.values())).fetchall())
        return self._store.row_decoder.read(self._name, rows, self._decode)

    async def rows_and_bytes(self) -> tuple[int, int]:
        """Return the number of rows and the length of their texts, with those of other second keys."""
        query = f"SELECT count(*), total(length(body)) FROM {self._name}"
        rows, length = await self._store.run(lambda db: db.execute(query).fetchone())
        return int(rows), int(length)

    async def put(
        self, name: str, value: V, actor: str = "", if_match: str | None = None, removed: Iterable[str] = ()
    ) -> str:
        """Store a value after deleting those named ``removed``, and return its etag.

        Raises EntryChanged if ``if_match`` is given and is not the present etag.
        """
        body = _json_value(value)
        detail = {"name": name, "body": body} if isinstance(value, dict) else body
        etag, row = etag_of(body), self._row(name, body)

        def put(db: sqlite3.Connection) -> str:
            present_etag = self._present_etag(db, name)
            self._require_etag(name, present_etag, if_match)
            db.executemany(f"DELETE FROM {self._name} WHERE {self._key} = ?", ((other,) for other in removed))
            self._insert(db, [row])
            if action := self._actions.create if present_etag is None else self._actions.replace:
                self._store.append_audit_entry(db, actor, action, detail)
            return etag

        return await self._store.run(put)

    async def try_put(self, name: str, value: V, removed: Iterable[str]) -> None:
        """Store a value as `put` does, or leave it to the memory of the caller if that fails, which the store logs."""
        with suppress(StoreUnavailable):
            await self.put(name, value, removed=removed)

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> bool:
        """Delete a value, with all second keys; False if there is none. Raises EntryChanged."""

        def delete(db: sqlite3.Connection) -> bool:
            present_etag = self._present_etag(db, name)
            if present_etag is None:
                return False
            self._require_etag(name, present_etag, if_match)
            db.execute(f"DELETE FROM {self._name} WHERE {self._key} = ?", (name,))
            if self._actions.delete:
                self._store.append_audit_entry(db, actor, self._actions.delete, {"name": name})
            return True

        return await self._store.run(delete)

    async def replace(self, values: Iterable[V]) -> None:
        """Store these values instead of all present ones, without an entry in the audit."""
        rows = [self._row(str(getattr(value, self._key)), _json_value(value)) for value in values]

        def replace(db: sqlite3.Connection) -> None:
            db.execute(f"DELETE FROM {self._name}")
            self._insert(db, rows)

        await self._store.run(replace)

    def _row(self, name: str, body: Any) -> dict[str, str]:
        etag = {"etag": etag_of(body)} if self._etag else {}
        return {self._key: name, "body": canonical_json(body)} | self._second_key | etag

    def _insert(self, db: sqlite3.Connection, rows: list[dict[str, str]]) -> None:
        for row in rows:
            columns, places = ", ".join(row), ", ".join("?" * len(row))
            db.execute(f"INSERT OR REPLACE INTO {self._name} ({columns}) VALUES ({places})", tuple(row.values()))

    def _present_etag(self, db: sqlite3.Connection, name: str) -> str | None:
        """Return the etag of a value, which is empty in a table without etags; None without such a value."""
        etag = "etag" if self._etag else "''"
        row = db.execute(f"SELECT {etag} FROM {self._name} WHERE {self._key} = ?", (name,)).fetchone()
        return str(row[0]) if row else None

    def _require_etag(self, name: str, present_etag: str | None, if_match: str | None) -> None:
        if if_match is not None and if_match != present_etag:
            noun = self._name.removesuffix("s")
            raise EntryChanged(f"{noun} {name} has changed: its ETag is {present_etag or 'none, it does not exist'}")

    def _decode(self, name: object, etag: object, body: object) -> Row[V]:
        """Decode a row. Raises ValueError or TypeError if it is damaged."""
        value = from_text(self._kind, body)
        name_in_body = value.get(self._key, name) if isinstance(value, dict) else getattr(value, self._key)
        if name_in_body != name:
            raise ValueError("its name differs from the name in its body")
        if not self._is_valid(value):
            raise ValueError("a part of it is missing or invalid")
        return Row(require_text(name), value, require_text(etag))


def _json_value(value: Any) -> Any:
    return value if isinstance(value, dict) else asdict(value)


Origin = Literal["built-in", "file", "api"]


class HasName(Protocol):
    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=HasName)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class RegistryItem(Generic[D, E]):
    """``entry`` is the value as the API shows it, in the format of the configuration file."""

    value: D
    entry: E


class Registry(ABC, Generic[D, E]):
    """Values that the configuration fixes, and values of the API, which the store keeps.

    The former take precedence over those of the same name, and are read-only here. Every method that changes something
    raises StoreUnavailable.
    """

    noun: ClassVar[str]
    max_values: ClassVar[int]
    """Maximum number of values of the API."""

    def __init__(self, table: Table[dict[str, Any]]) -> None:
        self._table = table
        self._lock = asyncio.Lock()
        self._fixed: Mapping[str, RegistryItem[D, E]] = {}
        self._stored: Mapping[str, RegistryItem[D, E]] = {}
        self._items: Mapping[str, RegistryItem[D, E]] = {}

    @abstractmethod
    def _value(self, body: Mapping[str, Any]) -> D:
        """Return a stored value. Raises ValueError if this version cannot read it."""

    @abstractmethod
    def _body(self, value: D) -> dict[str, Any]:
        """Return the value in the format of the configuration file."""

    @abstractmethod
    def _entry(self, name: str, etag: str, body: dict[str, Any]) -> E:
        """Return the entry of a value of the API."""

    def _rebuild(self) -> None:
        """Replace what is in effect after a change. Subclasses add to it."""
        stored = {name: each for name, each in self._stored.items() if name not in self._fixed}
        self._items = {**self._fixed, **stored}

    async def load(self) -> list[str]:
        """Load the stored values. Returns those that this version cannot read; they remain in the store."""
        invalid: list[str] = []
        stored: dict[str, RegistryItem[D, E]] = {}
        for row in await self._table.rows():
            try:
                value = self._value(row.value)
            except ValueError as error:
                invalid.append(f"{row.name}: {' '.join(str(error).split())}")
            else:
                stored[row.name] = RegistryItem(value, self._entry(row.name, row.etag, row.value))
        self._stored = stored
        self._rebuild()
        return invalid

    def entries(self) -> list[E]:
        return [item.entry for item in self._items.values()]

    def get(self, name: str) -> E:
        """Return the entry. Raises NoSuchEntry."""
        if name not in self._items:
            raise NoSuchEntry(f"no {self.noun} has the name {name}{did_you_mean(name, self._items)}")
        return self._items[name].entry

    async def put(self, value: D, actor: str, if_match: str | None = None, must_be_new: bool = False) -> E:
        """Create or replace a value. Raises EntryConflict (also if ``must_be_new`` and it exists), EntryChanged."""
        name, body = value.name, self._body(value)
        async with self._lock:
            self._check_writable(name)
            if must_be_new and name in self._stored:
                raise EntryConflict(f"the {self.noun} {name} already exists; use PUT to replace it")
            if name not in self._stored and len(self._stored) >= self.max_values:
                raise EntryConflict(f"the limit of {self.max_values} {self.noun}s is reached; delete one first")
            entry = self._entry(name, await self._table.put(name, body, actor, if_match), body)
            self._stored = {**self._stored, name: RegistryItem(value, entry)}
            self._rebuild()
            return entry

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a value. Raises NoSuchEntry, EntryConflict, EntryChanged."""
        async with self._lock:
            self._check_writable(name)
            if not await self._table.delete(name, actor, if_match):
                raise NoSuchEntry(f"no {self.noun} created through the API is named {name}")
            self._stored = {other: each for other, each in self._stored.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        """Raise EntryConflict if the configuration fixes the value."""
        if name in self._fixed:
            raise EntryConflict(f"{name} is defined in the configuration file; change it there, then POST /-/reload")
