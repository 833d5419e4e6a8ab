"""What the configuration file and the API both define: rules and quotas, by name."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from gpumond.facts.errors import DefinitionConflict, NoSuchDefinition
from gpumond.store.table import Table

Origin = Literal["built-in", "file", "api"]


class Named(Protocol):
    @property
    def name(self) -> str: ...


V = TypeVar("V", bound=Named)
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Registered(Generic[V, E]):
    """``entry`` is the value as the API shows it, in the format of the configuration file."""

    value: V
    entry: E


class Registry(ABC, Generic[V, E]):
    """Values that the configuration fixes, and values of the API, which the store keeps.

    The former take precedence over those of the same name, and are read-only here. Every method that changes something
    raises StoreUnavailable.
    """

    noun: ClassVar[str]
    limit: ClassVar[int]
    """Values of the API."""

    def __init__(self, table: Table[dict[str, Any]]) -> None:
        self._table = table
        self._lock = asyncio.Lock()
        self._fixed: Mapping[str, Registered[V, E]] = {}
        self._stored: Mapping[str, Registered[V, E]] = {}
        self._registered: Mapping[str, Registered[V, E]] = {}
        self.loaded = False

    @abstractmethod
    def _value(self, body: Mapping[str, Any]) -> V:
        """Return a stored value. Raises ValueError if this version cannot read it."""

    @abstractmethod
    def _body(self, value: V) -> dict[str, Any]:
        """Return the value in the format of the configuration file."""

    @abstractmethod
    def _entry(self, name: str, etag: str, body: dict[str, Any]) -> E:
        """Return the entry of a value of the API."""

    def _rebuild(self) -> None:
        """Replace what is in effect after a change. Subclasses add to it."""
        stored = {name: each for name, each in self._stored.items() if name not in self._fixed}
        self._registered = {**self._fixed, **stored}

    async def load(self) -> list[str]:
        """Load the stored values. Returns those that this version cannot read; they remain in the store."""
        invalid: list[str] = []
        stored: dict[str, Registered[V, E]] = {}
        for row in await self._table.rows():
            try:
                value = self._value(row.value)
            except ValueError as error:
                invalid.append(f"{row.name}: {' '.join(str(error).split())}")
            else:
                stored[row.name] = Registered(value, self._entry(row.name, row.etag, row.value))
        self._stored, self.loaded = stored, True
        self._rebuild()
        return invalid

    def entries(self) -> list[E]:
        return [registered.entry for registered in self._registered.values()]

    def get(self, name: str) -> E:
        """Return the entry. Raises NoSuchDefinition."""
        if name not in self._registered:
            raise NoSuchDefinition(f"no {self.noun} has the name {name}")
        return self._registered[name].entry

    async def put(self, value: V, actor: str, if_match: str | None = None, new: bool = False) -> E:
        """Create or replace a value. Raises DefinitionConflict (also if ``new`` and it exists), DefinitionChanged."""
        name, body = value.name, self._body(value)
        async with self._lock:
            self._check_writable(name)
            if new and name in self._stored:
                raise DefinitionConflict(f"the {self.noun} {name} already exists; use PUT to replace it")
            if name not in self._stored and len(self._stored) >= self.limit:
                raise DefinitionConflict(f"the limit of {self.limit} {self.noun}s is reached; delete one first")
            entry = self._entry(name, await self._table.put(name, body, actor, if_match), body)
            self._stored = {**self._stored, name: Registered(value, entry)}
            self._rebuild()
            return entry

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a value. Raises NoSuchDefinition, DefinitionConflict, DefinitionChanged."""
        async with self._lock:
            self._check_writable(name)
            if not await self._table.delete(name, actor, if_match):
                raise NoSuchDefinition(f"the store has no {self.noun} {name}")
            self._stored = {other: each for other, each in self._stored.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        """Raise DefinitionConflict if the configuration fixes the value."""
        if name in self._fixed:
            raise DefinitionConflict(
                f"{name} is defined in the configuration file; change it there, then POST /-/reload"
            )
