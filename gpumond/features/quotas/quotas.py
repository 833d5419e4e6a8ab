"""Quotas of the processes of a snapshot: those of the configuration file, those set through the API, which the store
keeps, and the limits that are due in programs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpumond.config.settings import Settings
from gpumond.core import AdmissionService, Core, FlushService, Part, SuspendService, Tick
from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.messages import AgentResponse
from gpumond.facts.program import AppliedLimit, PoolLimit, ProcessKey
from gpumond.facts.quota import NO_QUOTA, EffectiveQuota, Quota, QuotaAttributes, QuotaTable
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessQuota, ProcessUsage, Snapshot
from gpumond.facts.units import HOUR_SECONDS, backoff_seconds
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.borrow import Borrows
from gpumond.features.quotas.cgroups import CgroupLimiter
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.host.machine import find_process
from gpumond.host.peer import person_uid
from gpumond.host.tasks import Tasks
from gpumond.serve.limits import TokenBucket
from gpumond.store.table import AuditActions, Registry, RegistryItem, Table, Transactions, etag_of

QuotaOrigin = Literal["file", "api"]

MAX_QUOTAS = 200


def quota_table(store: Transactions) -> Table[dict[str, Any]]:
    """Return the store's table of quotas, each in the format of the configuration file."""
    return Table(
        store,
        "quotas",
        dict[str, Any],
        etag=True,
        is_valid=lambda quota: "name" in quota,
        actions=AuditActions("quota.create", "quota.replace", "quota.delete"),
    )


@dataclass(frozen=True, slots=True)
class QuotaEntry:
    """One quota in the format of the configuration file. The API can change only those of origin ``api``."""

    name: str
    origin: QuotaOrigin
    etag: str
    quota: dict[str, Any] = field(hash=False)


class QuotaRegistry(Registry[Quota, QuotaEntry]):
    """``table`` contains the quotas in effect; it is replaced as a whole."""

    noun, max_values = "quota", MAX_QUOTAS

    def __init__(self, file_quotas: Iterable[Quota], store: Transactions) -> None:
        super().__init__(quota_table(store))
        self.configure(file_quotas)

    def configure(self, file_quotas: Iterable[Quota]) -> None:
        """Set the configuration's quotas. They take precedence over API quotas of the same name."""
        fixed: dict[str, RegistryItem[Quota, QuotaEntry]] = {}
        for quota in file_quotas:
            body = self._body(quota)
            fixed[quota.name] = RegistryItem(quota, QuotaEntry(quota.name, "file", etag_of(body), body))
        self._fixed = fixed
        self._rebuild()

    def _value(self, body: Mapping[str, Any]) -> Quota:
        return QuotaConfig.model_validate(body).quota()

    def _body(self, quota: Quota) -> dict[str, Any]:
        match = {name: getattr(quota, name) for name in ("workload", "user", "container", "namespace")}
        limits = {
            "soft_limit": quota.soft_limit_bytes,
            "limit": quota.limit_bytes,
            "reserve": quota.reserve_bytes,
            "cgroup_limit": quota.cgroup_limit_bytes,
        }
        return {"name": quota.name, "match": _drop_none(match)} | _drop_none(limits)

    def _entry(self, name: str, etag: str, body: dict[str, Any]) -> QuotaEntry:
        return QuotaEntry(name, "api", etag, body)

    def _rebuild(self) -> None:
        super()._rebuild()
        self.table = QuotaTable([registered.value for registered in self._items.values()])


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


RETRY_SECONDS = 10.0
"""Time until a limit that the program does not report is sent again. It doubles with each attempt."""
MAX_RETRY_SECONDS = 600.0


def assign_quotas(
    table: QuotaTable, devices: Sequence[DeviceReading], reports: Sequence[AgentReport]
) -> tuple[ProcessQuota, ...]:
    """Return each process that a quota matches, with its quota."""
    if not table.quotas:
        return ()
    listed = {key: process for device in devices for key, process in device.processes_by_key.items()}
    reported = {report.key: report for report in reports}
    assigned: list[ProcessQuota] = []
    for key in {**listed, **reported}:
        attributes = _attributes_of(listed.get(key), reported.get(key))
        quota = table.of(attributes)
        if quota is not NO_QUOTA:
            assigned.append(ProcessQuota(pid=key.pid, start_ticks=key.start_ticks, quota=quota))
    return tuple(assigned)


def _attributes_of(process: ProcessUsage | None, report: AgentReport | None) -> QuotaAttributes:
    uid = report.uid if report else process.uid if process else None
    names = (process.user if process else None, None if uid is None else str(uid))
    return QuotaAttributes(
        (report.workload if report else "") or (process.comm if process else None) or "",
        tuple(name for name in names if name) or ("",),
        (process.container_name or process.container if process else None) or "",
        (process.pod_namespace if process else None) or "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentLimit:
    """The newest limit that was sent to a program: the limit and its quota, the program's pools at that time, and the
    elapsed seconds from which it may be sent again. ``refused``: allocators that answered that they cannot be limited.
    """

    limit_bytes: int | None
    quota: str
    pools: frozenset[tuple[str, str]]
    again_at: float = 0.0
    failures: int = 0
    refused: frozenset[str] = frozenset()

    def is_same_limit(self, other: SentLimit) -> bool:
        return (self.limit_bytes, self.quota, self.pools) == (other.limit_bytes, other.quota, other.pools)


SentLimits = Mapping[ProcessKey, SentLimit]


@dataclass(frozen=True, slots=True)
class DueLimit:
    """A limit to be set in a program. ``limit_bytes`` None removes the limit that the quota has set."""

    report: AgentReport
    limit_bytes: int | None
    quota: str


def due_limits(snapshot: Snapshot, sent: SentLimits) -> tuple[list[DueLimit], dict[ProcessKey, SentLimit]]:
    """Return the limits that are due now, and what will have been sent then.

    A lower limit that the program or an administrator has set remains.
    """
    due: list[DueLimit] = []
    after = {report.key: sent[report.key] for report in snapshot.reports if report.key in sent}
    for report in snapshot.reports:
        if not report.allows_limit or not report.pools:
            continue
        quota = snapshot.quotas_by_process.get(report.key, NO_QUOTA)
        before = after.get(report.key)
        if before is None and quota.limit_bytes is None and not report.limits:
            continue
        pools = frozenset((pool.allocator, pool.device_uuid) for pool in report.pools)
        required = SentLimit(limit_bytes=quota.limit_bytes, quota=quota.limit_quota, pools=pools)
        if before is not None and not before.is_same_limit(required):
            before = None
        if not _differs_from_quota(report, quota, pools, before.refused if before else frozenset()):
            if before is not None:
                after[report.key] = replace(before, again_at=0.0, failures=0)
            continue
        if before is not None and snapshot.elapsed_seconds < before.again_at:
            continue
        failures = before.failures + 1 if before else 0
        again_at = snapshot.elapsed_seconds + backoff_seconds(RETRY_SECONDS, failures, MAX_RETRY_SECONDS)
        set_by = next((limit.quota for limit in report.limits if limit.quota), "")
        due.append(DueLimit(report, quota.limit_bytes, quota.limit_quota or set_by))
        after[report.key] = replace(before or required, again_at=again_at, failures=failures)
    return due, after


def with_refusals(sent: SentLimit, answer: Sequence[AppliedLimit]) -> SentLimit:
    """Return the limit that was sent, with the allocators that refused it."""
    return replace(sent, refused=frozenset(each.allocator for each in answer if not each.applied))


def _differs_from_quota(
    report: AgentReport, quota: EffectiveQuota, pools: frozenset[tuple[str, str]], refused: frozenset[str]
) -> bool:
    """Return True if a pool has another limit than its quota, except the allocators that refused it."""
    if quota.limit_bytes is None:
        return any(each.quota for each in report.limits)
    limits = {(each.allocator, each.device_uuid): each for each in report.limits}
    limitable = (pool for pool in pools if pool[0] not in refused)
    return not all(pool in limits and _agrees_with_quota(limits[pool], quota) for pool in limitable)


def _agrees_with_quota(limit: PoolLimit, quota: EffectiveQuota) -> bool:
    """Return True for the limit of the quota, and for a lower one that another requester has set."""
    assert quota.limit_bytes is not None
    if limit.quota:
        return (limit.limit_bytes, limit.quota) == (quota.limit_bytes, quota.limit_quota)
    return limit.limit_bytes <= quota.limit_bytes


MAX_CONCURRENT_PROGRAMS = 16
"""Programs of one user to which a limit is sent at the same time."""
MAX_LIMITS_PER_HOUR = 128
"""Limits sent to the programs of one user, so a program that changes its limit does not fill the audit."""


class ProgramLimiter:
    """Sets the quotas' limits in programs. ``set_limit`` sets that of one program, and raises StoreUnavailable if
    that cannot be recorded.
    """

    def __init__(self, set_limit: Callable[[AgentReport, int | None, str], Awaitable[AgentResponse | None]]) -> None:
        self._set_limit = set_limit
        self._sent: dict[ProcessKey, SentLimit] = {}
        self._answers: list[tuple[DueLimit, Sequence[AppliedLimit]]] = []
        """Answers since the last decision. They are noted before the next decision, during which others may arrive."""
        self._semaphores: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_CONCURRENT_PROGRAMS)
        )
        self._rate = TokenBucket(MAX_LIMITS_PER_HOUR, HOUR_SECONDS)
        self._tasks = Tasks()

    def execute(self, snapshot: Snapshot) -> None:
        """Start to set the limits that are due; waits for none of them."""
        self._note_answers()
        due, self._sent = due_limits(snapshot, self._sent)
        for each in due:
            user, now = str(person_uid(each.report.uid)), snapshot.elapsed_seconds
            if self._rate.wait_seconds(user, now) > 0:
                continue  # it is due again later
            self._rate.spend(user, now)
            self._tasks.start(self._carry_out(each))

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _carry_out(self, due: DueLimit) -> None:
        async with self._semaphores[person_uid(due.report.uid)]:
            try:
                answer = await self._set_limit(due.report, due.limit_bytes, due.quota)
            except StoreUnavailable:
                return  # the store has logged it; the limit is due again later
        if answer is not None:
            self._answers.append((due, answer.limits))

    def _note_answers(self) -> None:
        for due, limits in self._answers:
            sent = self._sent.get(due.report.key)
            if sent is not None and (sent.limit_bytes, sent.quota) == (due.limit_bytes, due.quota):
                self._sent[due.report.key] = with_refusals(sent, limits)
        self._answers.clear()


class QuotasPart(Part):
    table = "quotas"

    def __init__(self, core: Core) -> None:
        self.loaded = False
        self.registry = QuotaRegistry(core.settings.quotas, core.store)
        self._limits = ProgramLimiter(core.program_requests.set_limit)
        self._cgroups = CgroupLimiter(core.store, core.store.audit, core.devices.change_limits)
        core.provide(QuotaRegistry, self.registry)

    async def load(self) -> Sequence[str]:
        invalid = await self.registry.load()
        await self._cgroups.load()
        self.loaded = True
        return invalid

    def observe(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, quotas=assign_quotas(self.registry.table, snapshot.devices, snapshot.reports))

    def act(self, tick: Tick) -> None:
        if self.loaded:  # until then, the limit of an unknown quota may be that of a stored one
            self._limits.execute(tick.frame.snapshot)
            self._cgroups.execute(tick.frame.snapshot)

    async def configure(self, settings: Settings) -> None:
        self.registry.configure(settings.quotas)

    async def close(self) -> None:
        await self._limits.close()
        await self._cgroups.close()


class AdmissionsPart(Admissions, Part):
    table = "admissions"

    def __init__(self, core: Core) -> None:
        flush, clock = core.get(FlushService).flush, core.clock.monotonic
        super().__init__(flush, lambda: core.settings.reclaim, find_process, clock, core.store, self._suspend_idle)
        core.provide(Admissions, self)
        core.provide(AdmissionService, self)
        self._core = core

    async def _suspend_idle(self, process: ProcessKey, requested_by: str, requested_for: str) -> None:
        suspends = self._core.find(SuspendService)
        if suspends is not None:
            await suspends.suspend_idle(process, requested_by, requested_for=requested_for)

    def conclude(self, tick: Tick) -> Tick:
        queue, grants = self.queue(tick.frame.snapshot), self.granted(tick.frame.snapshot)
        return replace(tick, frame=replace(tick.frame, queue=queue, grants=grants)) if queue or grants else tick

    def act(self, tick: Tick) -> None:
        self.execute(tick.frame.snapshot)


class BorrowsPart(Borrows, Part):
    def __init__(self, core: Core) -> None:
        self._programs = core.programs
        super().__init__(
            core.get(FlushService).flush,
            lambda: core.frame.snapshot if core.frame else None,
            core.get(Admissions).capacity_for,
            core.read_driver,
            lambda: core.settings.reclaim,
            core.clock.monotonic,
        )

    def start(self) -> None:
        self._programs.on_borrow(self.borrow)
