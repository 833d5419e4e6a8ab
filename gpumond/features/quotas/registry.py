"""Quotas in effect: those of the configuration file, and those set over the API, which the store keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpumond.facts.quota import Quota, QuotaTable
from gpumond.store.registry import Registered, Registry
from gpumond.store.table import Actions, Table, Transactions, etag_of

QuotaOrigin = Literal["file", "api"]

MAX_QUOTAS = 200


def quota_table(store: Transactions) -> Table[dict[str, Any]]:
    """Return the store's table of quotas, each in the format of the configuration file."""
    return Table(
        store,
        "quotas",
        dict[str, Any],
        etag=True,
        valid=lambda quota: "name" in quota,
        actions=Actions("quota.create", "quota.replace", "quota.delete"),
    )


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    """One quota in the format of the configuration file. Only those of origin ``api`` can be changed over the API."""

    name: str
    origin: QuotaOrigin
    etag: str
    quota: dict[str, Any] = field(hash=False)


class QuotaRegistry(Registry[Quota, QuotaEntry]):
    """``table`` contains the quotas in effect; it is replaced as a whole."""

    noun, limit = "quota", MAX_QUOTAS

    def __init__(self, file: Iterable[Quota], store: Transactions) -> None:
        super().__init__(quota_table(store))
        self.configure(file)

    def configure(self, file: Iterable[Quota]) -> None:
        """Set the configuration's quotas. They take precedence over API quotas of the same name."""
        fixed: dict[str, Registered[Quota, QuotaEntry]] = {}
        for quota in file:
            body = self._body(quota)
            fixed[quota.name] = Registered(quota, QuotaEntry(quota.name, "file", etag_of(body), body))
        self._fixed = fixed
        self._rebuild()

    def _value(self, body: Mapping[str, Any]) -> Quota:
        from gpumond.features.quotas.settings import QuotaConfig  # it imports pydantic; most stores have no quota

        return QuotaConfig.model_validate(body).quota()

    def _body(self, quota: Quota) -> dict[str, Any]:
        match = {name: getattr(quota, name) for name in ("workload", "user", "container", "namespace")}
        limits = {"soft_limit": quota.soft_limit_bytes, "limit": quota.limit_bytes, "reserve": quota.reserve_bytes}
        return {"name": quota.name, "match": _known(match)} | _known(limits)

    def _entry(self, name: str, etag: str, body: dict[str, Any]) -> QuotaEntry:
        return QuotaEntry(name, "api", etag, body)

    def _rebuild(self) -> None:
        super()._rebuild()
        self.table = QuotaTable([registered.value for registered in self._registered.values()])


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
