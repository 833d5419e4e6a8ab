"""Limits that quotas set for containers, which the driver keeps. No I/O, except in `CgroupLimiter`.

A limit or soft limit that somebody else has set is never changed: it is not known what depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.snapshot import CgroupLimit, CgroupLimitChange, DeviceReading, Snapshot
from gpumond.facts.units import backoff_seconds
from gpumond.store.table import Table, Transactions

RETRY_SECONDS = 10.0
"""Time until a limit that the driver does not report is set again. It doubles with each attempt."""
MAX_RETRY_SECONDS = 600.0
MAX_OWN_LIMITS = 1000
"""Maximum number of limits that are known as the daemon's own; those of the oldest containers are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedCgroupLimit:
    """The newest limit that a quota has set for a cgroup, and the one before. None: no limit.

    ``id``: device and cgroup. ``again_at``: elapsed seconds from which it may be set again.
    """

    id: str
    limit_bytes: int | None
    before_bytes: int | None
    quota: str
    again_at: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class DueChange:
    """A change that is due now, and its quota: the one that sets the limit, or that set it before."""

    change: CgroupLimitChange
    quota: str


OwnLimits = Mapping[str, AppliedCgroupLimit]


def due_changes(snapshot: Snapshot, own_limits: OwnLimits) -> tuple[list[DueChange], dict[str, AppliedCgroupLimit]]:
    """Return the changes that are due now, and the daemon's own limits after them."""
    due: list[DueChange] = []
    after = dict(own_limits)
    for device in snapshot.devices:
        for reported in device.cgroup_limits if not device.missed_readings else ():
            name = f"{device.uuid} {reported.cgroup}"
            own_limit = own_limits.get(name)
            limit, quota = _required_limit(snapshot, device, reported)
            if (own_limit is None and limit is None) or (reported.is_limited and not _is_own(reported, own_limit)):
                after.pop(name, None)
                continue
            if reported.limit_bytes == limit:
                if limit is None:
                    after.pop(name, None)
                elif own_limit is not None:
                    after[name] = replace(own_limit, again_at=0.0, failures=0)
                continue
            is_repeated = own_limit is not None and own_limit.limit_bytes == limit
            if own_limit is not None and is_repeated and snapshot.elapsed_seconds < own_limit.again_at:
                continue
            failures = own_limit.failures + 1 if own_limit is not None and is_repeated else 0
            after[name] = AppliedCgroupLimit(
                id=name,
                limit_bytes=limit,
                before_bytes=reported.limit_bytes,
                quota=quota or (own_limit.quota if own_limit else ""),
                again_at=snapshot.elapsed_seconds + backoff_seconds(RETRY_SECONDS, failures, MAX_RETRY_SECONDS),
                failures=failures,
            )
            change = CgroupLimitChange(
                device_uuid=device.uuid,
                cgroup=reported.cgroup,
                limit_bytes=limit,
                before_bytes=reported.limit_bytes,
            )
            due.append(DueChange(change, after[name].quota))
    for oldest in list(after)[: max(0, len(after) - MAX_OWN_LIMITS)]:
        del after[oldest]
    return due, after


def _is_own(reported: CgroupLimit, own_limit: AppliedCgroupLimit | None) -> bool:
    if own_limit is None or reported.guaranteed_bytes is not None:
        return False
    return reported.limit_bytes in (own_limit.limit_bytes, own_limit.before_bytes)


def _required_limit(snapshot: Snapshot, device: DeviceReading, reported: CgroupLimit) -> tuple[int | None, str]:
    """Return the lowest limit of the quotas that match a process of the container, and its quota."""
    processes = (each for each in device.processes or () if each.pid in reported.pids and each.container is not None)
    quotas = (snapshot.quotas_by_process.get(each.key) for each in processes)
    sizes = ((each.cgroup_limit_bytes, each.cgroup_limit_quota) for each in quotas if each is not None)
    limits = [(limit, quota) for limit, quota in sizes if limit is not None]
    return min(limits, default=(None, ""))


class CgroupLimiter:
    """Sets the quotas' limits on cgroups. ``change`` makes changes in the driver, ``audit`` records them before, and
    raises StoreUnavailable.
    """

    def __init__(
        self,
        store: Transactions,
        audit: Callable[[str, str, Any], Awaitable[Any]],
        change: Callable[[Iterable[CgroupLimitChange]], None],
    ) -> None:
        self._table = Table(store, "cgroup_limits", AppliedCgroupLimit, key="id")
        self._audit, self._change = audit, change
        self._own_limits: OwnLimits = {}
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Read the limits that earlier daemons have set. Raises StoreUnavailable."""
        self._own_limits = {row.name: replace(row.value, again_at=0.0, failures=0) for row in await self._table.rows()}

    def execute(self, snapshot: Snapshot) -> None:
        """Start to make the changes that are due; waits for none of them."""
        if self._task is not None and not self._task.done():
            return
        due, own_limits = due_changes(snapshot, self._own_limits)
        self._own_limits = own_limits
        if due:
            self._task = asyncio.create_task(self._carry_out(due, own_limits))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _carry_out(self, due: Iterable[DueChange], own_limits: OwnLimits) -> None:
        try:
            await self._table.replace(own_limits.values())
            for each in due:
                change = each.change
                detail = {
                    "device": change.device_uuid,
                    "cgroup": change.cgroup,
                    "limit_bytes": change.limit_bytes,
                    "before_bytes": change.before_bytes,
                }
                await self._audit(f"quota:{each.quota}", "cgroup.limit", detail)
                self._change([change])
        except StoreUnavailable:
            return  # the store has logged it; the changes are due again later
