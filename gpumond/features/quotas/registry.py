"""Quotas in effect: those of the configuration file, and those set over the API, which the store keeps."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from gpumond.facts.errors import NoSuchQuota, QuotaConflict
from gpumond.facts.quota import Quota, QuotaTable

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


class Registered(NamedTuple):
    entry: QuotaEntry
    quota: Quota


class QuotaRegistry:
    """``table`` contains the quotas in effect; it is replaced as a whole."""

    def __init__(self, file: Iterable[Quota], store: QuotaStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._stored: dict[str, Registered] = {}
        self.loaded = False
        self.configure(file)

    def configure(self, file: Iterable[Quota]) -> None:
        """Set the configuration's quotas. They take precedence over API quotas of the same name."""
        self._file = {quota.name: Registered(_entry(quota, "file"), quota) for quota in file}
        self._rebuild()

    async def load(self) -> list[str]:
        """Load the stored quotas. Returns those that this version cannot read; they remain in the store."""
        invalid: list[str] = []
        stored: dict[str, Registered] = {}
        for name, (etag, body) in (await self._store.quotas()).items():
            try:
                quota = _checked(body)
            except ValueError as error:
                invalid.append(f"{name}: {' '.join(str(error).split())}")
            else:
                stored[name] = Registered(QuotaEntry(name, "api", etag, body), quota)
        self._stored, self.loaded = stored, True
        self._rebuild()
        return invalid

    def entries(self) -> list[QuotaEntry]:
        return [each.entry for each in self._registered.values()]

    def get(self, name: str) -> QuotaEntry:
        """Return the quota. Raises NoSuchQuota."""
        if name not in self._registered:
            raise NoSuchQuota(f"no quota has the name {name}")
        return self._registered[name].entry

    async def put(self, quota: Quota, actor: str, if_match: str | None = None) -> QuotaEntry:
        """Create or replace a quota. Raises QuotaConflict, QuotaChanged, StoreUnavailable."""
        name, body = quota.name, written(quota)
        async with self._lock:
            self._check_writable(name)
            if name not in self._stored and len(self._stored) >= MAX_QUOTAS:
                raise QuotaConflict(f"the limit of {MAX_QUOTAS} quotas is reached; delete one first")
            etag = await self._store.put_quota(name, body, actor, if_match)
            entry = QuotaEntry(name, "api", etag, body)
            self._stored = {**self._stored, name: Registered(entry, quota)}
            self._rebuild()
            return entry

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a quota. Raises NoSuchQuota, QuotaConflict, QuotaChanged, StoreUnavailable."""
        async with self._lock:
            self._check_writable(name)
            await self._store.delete_quota(name, actor, if_match)
            self._stored = {other: each for other, each in self._stored.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        if name in self._file:
            raise QuotaConflict(f"{name} is defined in the configuration file; change it there, then POST /-/reload")

    def _rebuild(self) -> None:
        stored = {name: each for name, each in self._stored.items() if name not in self._file}
        self._registered = {**self._file, **stored}
        self.table = QuotaTable([each.quota for each in self._registered.values()])


def written(quota: Quota) -> dict[str, Any]:
    """Return the quota with the keys of `quotas.QuotaConfig`, sizes in bytes."""
    match = {name: getattr(quota, name) for name in ("workload", "user", "container", "namespace")}
    limits = {"soft": quota.soft_bytes, "limit": quota.limit_bytes, "reserve": quota.reserve_bytes}
    return {"name": quota.name, "match": _known(match)} | _known(limits)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _checked(body: Mapping[str, Any]) -> Quota:
    """Return a stored quota. Raises ValueError if this version cannot read it."""
    from gpumond.features.quotas.settings import QuotaConfig  # it imports pydantic, and most stores contain no quota

    return QuotaConfig.model_validate(body).quota()


def _entry(quota: Quota, origin: QuotaOrigin) -> QuotaEntry:
    body = written(quota)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return QuotaEntry(quota.name, origin, hashlib.sha256(text.encode()).hexdigest()[:16], body)
