"""Rules on processes, and on workloads: all programs of one user and one name. No I/O.

Values from the report of an agent are unknown without an agent that reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from gpumond.facts.alerts import Labels
from gpumond.facts.frame import Verdict
from gpumond.facts.pools import HostPool, PoolUsage
from gpumond.facts.program import TICKS_PER_SECOND
from gpumond.facts.quota import NO_QUOTA, EffectiveQuota
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.quantities.program_quantities import (
    HELD,
    HOST_POOL,
    LIVE,
    PROCESS_USED,
    PROCESS_UTILIZATION,
    PROGRAM,
    PROGRAM_COUNTERS,
    RECLAIMABLE,
    REPORT_AGE,
    STEP,
    STRANDED,
    UNMAPPED,
)
from gpumond.quantities.quantity import Quantity, number
from gpumond.quantities.scope import (
    DEVICE_LABELS,
    NO_VERDICT,
    UNKNOWN_VERDICTS,
    VERDICT_PLACEHOLDERS,
    VERDICTS,
    RuleContext,
    ScopeSpec,
    device_placeholders,
    increase,
    ratio,
    size,
    values_of_verdicts,
    values_without_verdict,
)
from gpumond.quantities.window import CounterHistory, RuleWindow, Workload
from gpumond.tick.claims import outermost_pools

NOBODY = ProcessUsage(pid=0, start_ticks=None, used_bytes=None)
"""Owner of memory without a known process."""

Fact = TypeVar("Fact")


class _Process(NamedTuple):
    """One process on one device, or NOBODY: the device as a whole, for memory without a known process."""

    device: DeviceReading
    process: ProcessUsage
    workload: str | None
    """None if it never had an agent."""
    silent: bool
    verdicts: Sequence[Verdict]
    verdict_values: Mapping[str, float | None]
    """Values of the verdicts."""
    snapshot: Snapshot
    recent: RuleWindow
    report: AgentReport | None = None
    """None without an agent that reports."""

    @property
    def quota(self) -> EffectiveQuota:
        quotas = self.snapshot.quotas_by_process
        return quotas.get(self.process.key, NO_QUOTA) if quotas else NO_QUOTA


def processes(context: RuleContext) -> Sequence[_Process]:
    snapshot, recent, active_verdicts = context.snapshot, context.recent, context.active_verdicts
    agents, silent, reports = recent.agents, recent.silent, snapshot.reports_by_process
    rows: list[_Process] = []
    for device in snapshot.devices:
        uuid = device.uuid
        for key, process in device.processes_by_key.items():
            gone = key in silent
            verdicts = active_verdicts.get((uuid, key), ())
            known = values_of_verdicts(verdicts, UNKNOWN_VERDICTS if gone else NO_VERDICT)
            workload = agents.get(key)
            name = None if workload is None else workload.name
            # Positional, because keywords take twice as long, for each process of each tick.
            rows.append(_Process(device, process, name, gone, verdicts, known, snapshot, recent, reports.get(key)))
        verdicts = active_verdicts.get((uuid, None), ())
        verdict_values = values_of_verdicts(verdicts, values_without_verdict(device))
        rows.append(
            _Process(
                device=device,
                process=NOBODY,
                workload=None,
                silent=False,
                verdicts=verdicts,
                verdict_values=verdict_values,
                snapshot=snapshot,
                recent=recent,
            )
        )
    return rows


def _limit_ratio(row: _Process) -> float | None:
    """Return the ratio of the pool that is closest to its limit, or that of the cgroup if it is higher."""
    ratios = [
        each.used_bytes / each.limit_bytes
        for each in row.device.cgroup_limits
        if each.limit_bytes and each.used_bytes is not None and row.process.pid in each.pids
    ]
    if row.report is not None and row.report.limits:
        held = {(pool.allocator, pool.device_uuid): pool.held_bytes for pool in row.report.pools}
        limits = {(each.allocator, each.device_uuid): each.limit_bytes for each in row.report.limits}
        own = (pool for pool in limits if pool in held and pool[1] == row.device.uuid)
        ratios += [held[pool] / limits[pool] for pool in own]
    return max(ratios, default=None)


def _excess(row: _Process) -> float | None:
    used, soft = row.process.used_bytes, row.quota.soft_limit_bytes
    if soft is None:
        return 0.0
    return None if used is None else float(max(0, used - soft))


def _reserve_shortage(row: _Process) -> float | None:
    if row.quota.reserve_bytes is None:
        return 0.0
    return row.snapshot.reserve_shortages.get((row.device.uuid, row.process.key))


def _labels(row: _Process) -> Labels:
    pid = row.process.pid
    return ("gpu", str(row.device.index)), ("pid", str(pid) if pid else ""), ("uuid", row.device.uuid)


def _age(row: _Process) -> float | None:
    now, started = row.snapshot.uptime_seconds, row.process.start_ticks
    return None if now is None or started is None else max(0.0, now - started / TICKS_PER_SECOND)


def _claim_excess(row: _Process) -> float | None:
    if row.report is None:
        return None
    own = (each for each in row.snapshot.excesses if each.device_uuid == row.device.uuid)
    return float(sum(each.claimed_bytes - each.limit_bytes for each in own if each.process == row.process.key))


def _size_or_empty(value: int | None) -> str:
    return "" if value is None else size(value)


def _idle_remedy(row: _Process) -> str:
    """Return how an idle program's memory is released: by a suspension where a flush returns less than half of it."""
    pid, report = row.process.pid, row.report
    if row.process is NOBODY:
        return "stop the program if you don't need it"
    used, flushed = row.snapshot.used_by(row.process.key, row.device) or 0, _reclaimable_bytes(row)
    if report and report.can_suspend and 2 * flushed < used:
        return f"gpumond suspend --pid {pid} would release {size(used)}; if you don't need the program, stop it"
    if flushed:
        return f"gpumond flush --pid {pid} would release {size(flushed)}; if you don't need the program, stop it"
    return "a flush of this program would release nothing; if you don't need the program, stop it"


def _soft_limit_remedy(row: _Process) -> str:
    """Return what a flush contributes to a program that is above its soft limit, and what else there is to do."""
    excess, flushed = (row.process.used_bytes or 0) - (row.quota.soft_limit_bytes or 0), _reclaimable_bytes(row)
    if not flushed:
        return "a flush of this program would release nothing; reduce the program's memory use, or raise the soft limit"
    flush = f"gpumond flush --pid {row.process.pid} would release {size(flushed)}"
    return (
        flush
        if flushed >= excess
        else f"{flush}, which isn't enough; reduce the program's memory use, or raise the soft limit"
    )


def _reclaimable_bytes(row: _Process) -> int:
    report = row.report
    return row.snapshot.reclaimable_from(report, row.device) if report and report.flush_policy != "never" else 0


def _usage(row: _Process) -> ProcessUsage:
    return row.process


def _history(row: _Process) -> CounterHistory | None:
    return None if row.report is None else row.recent.programs.get(row.report.key)


def _sum(
    quantity: Quantity[PoolUsage], read_pool: Callable[[PoolUsage], float | None] | None = None
) -> Quantity[_Process]:
    """Return the sum of a quantity over the pools on the device; unknown if no pool has the value."""
    value = read_pool or quantity.read

    def read(row: _Process) -> float | None:
        if row.report is None:
            return None
        pools = (pool for pool in outermost_pools(row.report.pools) if pool.device_uuid == row.device.uuid)
        known = [size for size in map(value, pools) if size is not None]
        return float(sum(known)) if known else None

    return Quantity(quantity.name, f"`{quantity.name}` of the process's pools on the device, summed.", read)


def _host_sum(quantity: Quantity[HostPool]) -> Quantity[_Process]:
    value = quantity.read

    def read(row: _Process) -> float | None:
        pools = row.report.host_pools if row.report else ()
        return float(sum(value(pool) or 0 for pool in pools)) if pools else None

    return Quantity(quantity.name, quantity.text, read)


def _with_increases(
    quantities: Iterable[Quantity[Fact]], part: Callable[[_Process], Fact | None]
) -> Iterator[Quantity[_Process]]:
    """Yield the rule values of an agent's quantities and, of those that count events, also the increases."""
    for quantity in quantities:
        value = quantity.of(part)
        yield value
        if quantity.counted:
            yield increase(value, PROGRAM_COUNTERS.index(quantity.name), _history)


PROCESS: ScopeSpec[_Process] = ScopeSpec(
    rows=processes,
    values=(
        PROCESS_USED.of(_usage),
        Quantity(
            "used_ratio",
            "used bytes as a fraction of the device's size",
            lambda row: ratio(row.process.used_bytes, row.device.size_bytes),
            exceeds_one=True,  # managed memory
        ),
        Quantity(
            "limit_bytes",
            "the lowest limit of the process's allocators and cgroup on the device; unknown without a limit",
            lambda row: row.snapshot.limits.get((row.device.uuid, row.process.key)),
        ),
        Quantity(
            "limit_ratio",
            "highest ratio of an allocator's held bytes, or of the cgroup's used bytes, to the limit; unknown without "
            "a limit",
            _limit_ratio,
            exceeds_one=True,
        ),
        Quantity(
            "soft_limit_excess_bytes",
            "used bytes above the process's lowest [soft limit](../how-to/quotas.md#soft-limit); 0 without one",
            _excess,
        ),
        Quantity(
            "reserve_shortage_bytes",
            "part of the process's [reserve](../how-to/quotas.md#reserve) that is neither in use nor available; "
            "0 without one",
            _reserve_shortage,
        ),
        Quantity(
            "agent_gone",
            "1 if the process's agent has stopped reporting, else 0; unknown without an agent",
            lambda row: None if row.workload is None else float(row.silent),
            boolean=True,
        ),
        PROCESS_UTILIZATION.of(_usage),
        Quantity("idle_seconds", "observed time without activity on the device", lambda row: row.process.idle_seconds),
        Quantity("age_seconds", "time since the process started", _age),
        Quantity(
            "orphaned",
            "1 if the process's parent has exited and no service manager supervises the process, else 0",
            lambda row: number(row.process.orphaned),
            boolean=True,
        ),
        Quantity(
            "report_excess_bytes",
            "bytes by which the agent's report exceeds the driver's count; unknown without an agent",
            _claim_excess,
        ),
        REPORT_AGE.of(lambda row: row.report),
        *map(_sum, (LIVE, HELD, RECLAIMABLE)),
        _sum(STRANDED, attrgetter("stranded_bytes")),
        _sum(UNMAPPED),
        *map(_host_sum, HOST_POOL),
        *_with_increases(STEP, lambda row: row.report.program.step if row.report else None),
        *_with_increases(PROGRAM, lambda row: row.report.program if row.report else None),
        *VERDICTS,
    ),
    labels={
        **DEVICE_LABELS,
        "pid": "the process's pid; empty for verdicts about memory of an unknown process",
        "workload": "the process's workload or command name, one of which must match",
    },
    labels_of=_labels,
    placeholders={
        **device_placeholders(lambda row: row.device),
        "pid": ("the process's pid", lambda row: str(row.process.pid)),
        "comm": ("the process's command name", lambda row: row.process.comm or "unknown program"),
        "workload": ("the process's workload", lambda row: row.workload or ""),
        "program": (
            "the process's workload, or its command name",
            lambda row: row.workload or row.process.comm or "unknown program",
        ),
        "used": ("the process's memory, as the driver counts it", lambda row: size(row.process.used_bytes)),
        "state": (
            "the process's state: alive, stopped, uninterruptible, zombie or gone",
            lambda row: row.process.state or "unknown",
        ),
        "quota": (
            "name of the quota that sets the soft limit; empty without one",
            lambda row: row.quota.soft_limit_quota,
        ),
        "soft_limit": (
            "the process's soft limit; empty without one",
            lambda row: _size_or_empty(row.quota.soft_limit_bytes),
        ),
        "soft_limit_remedy": ("how to get the process below its soft limit", _soft_limit_remedy),
        "reserve_quota": (
            "name of the quota that sets the reserve; empty without one",
            lambda row: row.quota.reserve_quota,
        ),
        "reserve": ("the process's reserve; empty without one", lambda row: _size_or_empty(row.quota.reserve_bytes)),
        "idle_remedy": ("how to release the process's memory while it's idle", _idle_remedy),
        **VERDICT_PLACEHOLDERS,
    },
    programs=lambda row: (row.workload or "", row.process.comm or ""),
    process=lambda row: None if row.process is NOBODY else row.process.key,
)


class _Workload(NamedTuple):
    workload: Workload
    sums: Mapping[str, int | None]
    programs: int
    known: bool


def workloads(context: RuleContext) -> Sequence[_Workload]:
    snapshot, recent = context.snapshot, context.recent
    partly = {recent.agents[identity] for identity in recent.silent}
    named: defaultdict[Workload, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys((quantity.name for quantity in _SUMMED), 0)
    )
    uncounted: set[Workload] = set()
    programs = Counter(Workload(report.uid, report.workload) for report in snapshot.reports)
    for report in snapshot.reports:
        if report.workload:
            workload = Workload(report.uid, report.workload)
            sums = named[workload]
            for pool in outermost_pools(report.pools):
                if pool.live_bytes is None:
                    uncounted.add(workload)
                sums["live_bytes"] += pool.live_bytes or 0
                sums["held_bytes"] += pool.held_bytes
                sums["reclaimable_bytes"] += pool.reclaimable.likely
                sums["stranded_bytes"] += pool.stranded_bytes
    return [
        _Workload(
            workload,
            {**sums, "live_bytes": None, "stranded_bytes": None} if workload in uncounted else sums,
            programs[workload],
            workload not in partly,
        )
        for workload, sums in named.items()
    ]


_SUMMED = (LIVE, HELD, RECLAIMABLE, STRANDED)


def _sum_of(name: str) -> Quantity[_Workload]:
    meaning = f"`{name}` of the workload's pools, summed."
    return Quantity(name, meaning, lambda row: number(row.sums[name]) if row.known else None)


WORKLOAD = ScopeSpec(
    rows=workloads,
    values=(
        *(_sum_of(quantity.name) for quantity in _SUMMED),
        Quantity(
            "programs",
            "number of the workload's programs with an agent that reports",
            lambda row: float(row.programs) if row.known else None,
        ),
    ),
    labels={"uid": "uid of the user", "workload": "name of the workload"},
    labels_of=lambda row: (("uid", str(row.workload.uid)), ("workload", row.workload.name)),
    placeholders={
        "uid": ("uid of the user", lambda row: str(row.workload.uid)),
        "workload": ("name of the workload", lambda row: row.workload.name),
        "live": ("memory allocated to the workload's programs", lambda row: size(row.sums["live_bytes"])),
        "held": ("memory held by the workload's pools", lambda row: size(row.sums["held_bytes"])),
        "reclaimable": (
            "bytes that a flush of the workload would release",
            lambda row: size(row.sums["reclaimable_bytes"]),
        ),
        "stranded": (
            "free memory that allocators keep and a flush can't release",
            lambda row: size(row.sums["stranded_bytes"]),
        ),
    },
)
