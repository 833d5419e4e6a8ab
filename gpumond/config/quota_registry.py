"""Quotas in effect: those of the configuration file, and those set over the API, which the store keeps."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gpumond.config.quotas import QuotaConfig
from gpumond.errors import NoSuchQuota, QuotaConflict
from gpumond.model.quota import QuotaTable

QuotaOrigin = Literal["file", "api"]

MAX_QUOTAS = 200


class QuotaStore(Protocol):
    async def quotas(self) -> dict[str, tuple[str, dict[str, Any]]]: ...
    async def put_quota(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str: ...
    async def delete_quota(self, name: str, actor: str, if_match: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    """One quota in the format of the configuration file. Only those of origin ``api`` can be changed over the API."""

    name: str
    origin: QuotaOrigin
    etag: str
    quota: dict[str, Any] = field(hash=False)


class QuotaRegistry:
    """``table`` contains the quotas in effect; it is replaced as a whole."""

    def __init__(self, file: Iterable[QuotaConfig], store: QuotaStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._stored: dict[str, QuotaEntry] = {}
        self.loaded = False
        self.configure(file)

    def configure(self, file: Iterable[QuotaConfig]) -> None:
        """Set the configuration's quotas. They take precedence over API quotas of the same name."""
        self._file = {config.name: _entry(config, "file") for config in file}
        self._rebuild()

    async def load(self) -> list[str]:
        """Load the stored quotas. Returns those that this version cannot read; they remain in the store."""
        invalid: list[str] = []
        stored: dict[str, QuotaEntry] = {}
        for name, (etag, body) in (await self._store.quotas()).items():
            try:
                QuotaConfig.model_validate(body)
            except ValueError as error:
                invalid.append(f"{name}: {' '.join(str(error).split())}")
            else:
                stored[name] = QuotaEntry(name, "api", etag, body)
        self._stored, self.loaded = stored, True
        self._rebuild()
        return invalid

    def entries(self) -> list[QuotaEntry]:
        return list(self._entries.values())

    def get(self, name: str) -> QuotaEntry:
        """Return the quota. Raises NoSuchQuota."""
        if name not in self._entries:
            raise NoSuchQuota(f"no quota has the name {name}")
        return self._entries[name]

    async def put(self, config: QuotaConfig, actor: str, if_match: str | None = None) -> QuotaEntry:
        """Create or replace a quota. Raises QuotaConflict, QuotaChanged, StoreUnavailable."""
        name, body = config.name, config.written()
        async with self._lock:
            self._check_writable(name)
            if name not in self._stored and len(self._stored) >= MAX_QUOTAS:
                raise QuotaConflict(f"the limit of {MAX_QUOTAS} quotas is reached; delete one first")
            etag = await self._store.put_quota(name, body, actor, if_match)
            self._stored = {**self._stored, name: QuotaEntry(name, "api", etag, body)}
            self._rebuild()
            return self._stored[name]

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a quota. Raises NoSuchQuota, QuotaConflict, QuotaChanged, StoreUnavailable."""
        async with self._lock:
            self._check_writable(name)
            await self._store.delete_quota(name, actor, if_match)
            self._stored = {other: entry for other, entry in self._stored.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        if name in self._file:
            raise QuotaConflict(f"{name} is defined in the configuration file; change it there, then POST /-/reload")

    def _rebuild(self) -> None:
        stored = {name: entry for name, entry in self._stored.items() if name not in self._file}
        self._entries = {**self._file, **stored}
        self.table = QuotaTable([QuotaConfig.model_validate(each.quota).quota() for each in self._entries.values()])


def _entry(config: QuotaConfig, origin: QuotaOrigin) -> QuotaEntry:
    body = config.written()
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return QuotaEntry(config.name, origin, hashlib.sha256(text.encode()).hexdigest()[:16], body)
