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
from gpumond.facts.units import size_text
from gpumond.quantities.program_quantities import (
    HELD,
    HOST_POOL_QUANTITIES,
    LIVE,
    PROCESS_USED,
    PROCESS_UTILIZATION,
    PROGRAM_COUNTERS,
    PROGRAM_QUANTITIES,
    RECLAIMABLE,
    REPORT_AGE,
    STEP_QUANTITIES,
    STRANDED,
    UNMAPPED,
)
from gpumond.quantities.quantity import Quantity, float_or_none
from gpumond.quantities.scope import (
    DEVICE_LABELS,
    UNKNOWN_VERDICT_VALUES,
    VALUES_WITHOUT_VERDICT,
    VERDICT_PLACEHOLDERS,
    VERDICT_QUANTITIES,
    RuleContext,
    ScopeSpec,
    device_placeholders,
    increase_quantity,
    ratio,
    size_text_or_unknown,
    values_without_verdict,
    verdict_values,
)
from gpumond.quantities.window import CounterHistory, RuleWindow, Workload
from gpumond.tick.claims import outermost_pools

UNKNOWN_PROCESS = ProcessUsage(pid=0, start_ticks=None, used_bytes=None)
"""The process of memory whose process isn't known."""

PartT = TypeVar("PartT")


class _ProcessRow(NamedTuple):
    """One process on one device, or UNKNOWN_PROCESS: the device as a whole, for memory without a known process."""

    device: DeviceReading
    process: ProcessUsage
    workload: str | None
    """None if the process never had an agent."""
    is_silent: bool
    verdicts: Sequence[Verdict]
    verdict_values: Mapping[str, float | None]
    snapshot: Snapshot
    window: RuleWindow
    report: AgentReport | None = None
    """None without an agent that reports."""

    @property
    def quota(self) -> EffectiveQuota:
        quotas = self.snapshot.quotas_by_process
        return quotas.get(self.process.key, NO_QUOTA) if quotas else NO_QUOTA


def process_rows(context: RuleContext) -> Sequence[_ProcessRow]:
    snapshot, window, problem_verdicts = context.snapshot, context.window, context.problem_verdicts
    workloads, silent, reports = window.workload_by_process, window.silent_processes, snapshot.reports_by_process
    rows: list[_ProcessRow] = []
    for device in snapshot.devices:
        uuid = device.uuid
        for key, process in device.processes_by_key.items():
            is_silent = key in silent
            verdicts = problem_verdicts.get((uuid, key), ())
            values = verdict_values(verdicts, UNKNOWN_VERDICT_VALUES if is_silent else VALUES_WITHOUT_VERDICT)
            workload = workloads.get(key)
            name = None if workload is None else workload.name
            # Positional, because keywords take twice as long, for each process of each tick.
            rows.append(
                _ProcessRow(device, process, name, is_silent, verdicts, values, snapshot, window, reports.get(key))
            )
        verdicts = problem_verdicts.get((uuid, None), ())
        rows.append(
            _ProcessRow(
                device=device,
                process=UNKNOWN_PROCESS,
                workload=None,
                is_silent=False,
                verdicts=verdicts,
                verdict_values=verdict_values(verdicts, values_without_verdict(device)),
                snapshot=snapshot,
                window=window,
            )
        )
    return rows


def _limit_ratio(row: _ProcessRow) -> float | None:
    """Return the ratio of the pool that is closest to its limit, or that of the cgroup if it is higher."""
    ratios = [
        each.used_bytes / each.limit_bytes
        for each in row.device.cgroup_limits
        if each.limit_bytes and each.used_bytes is not None and row.process.pid in each.pids
    ]
    if row.report is not None and row.report.limits:
        held = {(pool.allocator, pool.device_uuid): pool.held_bytes for pool in row.report.pools}
        limits = {(each.allocator, each.device_uuid): each.limit_bytes for each in row.report.limits}
        limited_pools = (pool for pool in limits if pool in held and pool[1] == row.device.uuid)
        ratios += [held[pool] / limits[pool] for pool in limited_pools]
    return max(ratios, default=None)


def _soft_limit_excess_bytes(row: _ProcessRow) -> float | None:
    used, soft = row.process.used_bytes, row.quota.soft_limit_bytes
    if soft is None:
        return 0.0
    return None if used is None else float(max(0, used - soft))


def _reserve_shortage_bytes(row: _ProcessRow) -> float | None:
    if row.quota.reserve_bytes is None:
        return 0.0
    return row.snapshot.reserve_shortages.get((row.device.uuid, row.process.key))


def _labels(row: _ProcessRow) -> Labels:
    pid = row.process.pid
    return ("gpu", str(row.device.index)), ("pid", str(pid) if pid else ""), ("uuid", row.device.uuid)


def _age_seconds(row: _ProcessRow) -> float | None:
    uptime, start_ticks = row.snapshot.uptime_seconds, row.process.start_ticks
    return None if uptime is None or start_ticks is None else max(0.0, uptime - start_ticks / TICKS_PER_SECOND)


def _report_excess_bytes(row: _ProcessRow) -> float | None:
    if row.report is None:
        return None
    excesses = (each for each in row.snapshot.excesses if each.device_uuid == row.device.uuid)
    return float(sum(each.claimed_bytes - each.limit_bytes for each in excesses if each.process == row.process.key))


def _size_or_empty(value: int | None) -> str:
    return "" if value is None else size_text(value)


def _idle_remedy(row: _ProcessRow) -> str:
    """Return how an idle program's memory is released: by a suspension where a flush returns less than half of it."""
    pid, report = row.process.pid, row.report
    if row.process is UNKNOWN_PROCESS:
        return "stop the program if you don't need it"
    used, reclaimable = row.snapshot.used_by(row.process.key, row.device) or 0, _reclaimable_bytes(row)
    if report and report.can_suspend and 2 * reclaimable < used:
        return f"to release {size_text(used)}: gpumond suspend --pid {pid}; if you don't need the program, stop it"
    if reclaimable:
        return f"to release {size_text(reclaimable)}: gpumond flush --pid {pid}; if you don't need the program, stop it"
    return "a flush of this program would release nothing; if you don't need the program, stop it"


def _soft_limit_remedy(row: _ProcessRow) -> str:
    """Return what a flush contributes to a program that is above its soft limit, and what else there is to do."""
    excess, reclaimable = (row.process.used_bytes or 0) - (row.quota.soft_limit_bytes or 0), _reclaimable_bytes(row)
    if not reclaimable:
        return "a flush of this program would release nothing; reduce the program's memory use, or raise the soft limit"
    flush = f"to release {size_text(reclaimable)}: gpumond flush --pid {row.process.pid}"
    if reclaimable >= excess:
        return flush
    return f"{flush}; that isn't enough, so also reduce the program's memory use, or raise the soft limit"


def _reclaimable_bytes(row: _ProcessRow) -> int:
    report = row.report
    return row.snapshot.reclaimable_from(report, row.device) if report and report.flush_policy != "never" else 0


def _process_usage(row: _ProcessRow) -> ProcessUsage:
    return row.process


def _counter_history(row: _ProcessRow) -> CounterHistory | None:
    return None if row.report is None else row.window.program_counters.get(row.report.key)


def _pool_sum(
    quantity: Quantity[PoolUsage], read_pool: Callable[[PoolUsage], float | None] | None = None
) -> Quantity[_ProcessRow]:
    """Return the sum of a quantity over the pools on the device; unknown if no pool has the value."""
    value = read_pool or quantity.read

    def read(row: _ProcessRow) -> float | None:
        if row.report is None:
            return None
        pools = (pool for pool in outermost_pools(row.report.pools) if pool.device_uuid == row.device.uuid)
        sizes = [size for size in map(value, pools) if size is not None]
        return float(sum(sizes)) if sizes else None

    return Quantity(quantity.name, f"`{quantity.name}` of the process's pools on the device, summed.", read)


def _host_pool_sum(quantity: Quantity[HostPool]) -> Quantity[_ProcessRow]:
    value = quantity.read

    def read(row: _ProcessRow) -> float | None:
        pools = row.report.host_pools if row.report else ()
        return float(sum(value(pool) or 0 for pool in pools)) if pools else None

    return Quantity(quantity.name, quantity.text, read)


def _with_increases(
    quantities: Iterable[Quantity[PartT]], part_of: Callable[[_ProcessRow], PartT | None]
) -> Iterator[Quantity[_ProcessRow]]:
    """Yield the rule values of an agent's quantities and, of those that count events, also the increases."""
    for quantity in quantities:
        value = quantity.of_part(part_of)
        yield value
        if quantity.is_counter:
            yield increase_quantity(value, PROGRAM_COUNTERS.index(quantity.name), _counter_history)


PROCESS_SCOPE: ScopeSpec[_ProcessRow] = ScopeSpec(
    rows=process_rows,
    quantities=(
        PROCESS_USED.of_part(_process_usage),
        Quantity(
            "used_ratio",
            "used bytes as a fraction of the device's size",
            lambda row: ratio(row.process.used_bytes, row.device.size_bytes),
            may_exceed_one=True,  # managed memory
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
            may_exceed_one=True,
        ),
        Quantity(
            "soft_limit_excess_bytes",
            "used bytes above the process's lowest [soft limit](../how-to/quotas.md#soft-limit); 0 without one",
            _soft_limit_excess_bytes,
        ),
        Quantity(
            "reserve_shortage_bytes",
            "part of the process's [reserve](../how-to/quotas.md#reserve) that is neither in use nor available; "
            "0 without one",
            _reserve_shortage_bytes,
        ),
        Quantity(
            "agent_gone",
            "1 if the process's agent has stopped reporting, else 0; unknown without an agent",
            lambda row: None if row.workload is None else float(row.is_silent),
            is_boolean=True,
        ),
        PROCESS_UTILIZATION.of_part(_process_usage),
        Quantity("idle_seconds", "observed time without activity on the device", lambda row: row.process.idle_seconds),
        Quantity("age_seconds", "time since the process started", _age_seconds),
        Quantity(
            "orphaned",
            "1 if the process's parent has exited and no service manager supervises the process, else 0",
            lambda row: float_or_none(row.process.orphaned),
            is_boolean=True,
        ),
        Quantity(
            "report_excess_bytes",
            "bytes by which the agent's report exceeds the driver's count; unknown without an agent",
            _report_excess_bytes,
        ),
        REPORT_AGE.of_part(lambda row: row.report),
        *map(_pool_sum, (LIVE, HELD, RECLAIMABLE)),
        _pool_sum(STRANDED, attrgetter("stranded_bytes")),
        _pool_sum(UNMAPPED),
        *map(_host_pool_sum, HOST_POOL_QUANTITIES),
        *_with_increases(STEP_QUANTITIES, lambda row: row.report.program.step if row.report else None),
        *_with_increases(PROGRAM_QUANTITIES, lambda row: row.report.program if row.report else None),
        *VERDICT_QUANTITIES,
    ),
    label_meanings={
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
        "used": (
            "the process's memory, as the driver counts it",
            lambda row: size_text_or_unknown(row.process.used_bytes),
        ),
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
    process=lambda row: None if row.process is UNKNOWN_PROCESS else row.process.key,
)


class _WorkloadRow(NamedTuple):
    workload: Workload
    sums: Mapping[str, int | None]
    programs: int
    all_report: bool


def workload_rows(context: RuleContext) -> Sequence[_WorkloadRow]:
    snapshot, window = context.snapshot, context.window
    silent_workloads = {window.workload_by_process[process] for process in window.silent_processes}
    sums_by_workload: defaultdict[Workload, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys((quantity.name for quantity in _WORKLOAD_QUANTITIES), 0)
    )
    without_live: set[Workload] = set()
    programs = Counter(Workload(report.uid, report.workload) for report in snapshot.reports)
    for report in snapshot.reports:
        if report.workload:
            workload = Workload(report.uid, report.workload)
            sums = sums_by_workload[workload]
            for pool in outermost_pools(report.pools):
                if pool.live_bytes is None:
                    without_live.add(workload)
                sums["live_bytes"] += pool.live_bytes or 0
                sums["held_bytes"] += pool.held_bytes
                sums["reclaimable_bytes"] += pool.reclaimable.likely
                sums["stranded_bytes"] += pool.stranded_bytes
    return [
        _WorkloadRow(
            workload,
            {**sums, "live_bytes": None, "stranded_bytes": None} if workload in without_live else sums,
            programs[workload],
            workload not in silent_workloads,
        )
        for workload, sums in sums_by_workload.items()
    ]


_WORKLOAD_QUANTITIES = (LIVE, HELD, RECLAIMABLE, STRANDED)


def _workload_sum(name: str) -> Quantity[_WorkloadRow]:
    meaning = f"`{name}` of the workload's pools, summed."
    return Quantity(name, meaning, lambda row: float_or_none(row.sums[name]) if row.all_report else None)


WORKLOAD_SCOPE = ScopeSpec(
    rows=workload_rows,
    quantities=(
        *(_workload_sum(quantity.name) for quantity in _WORKLOAD_QUANTITIES),
        Quantity(
            "programs",
            "number of the workload's programs with an agent that reports",
            lambda row: float(row.programs) if row.all_report else None,
        ),
    ),
    label_meanings={"uid": "uid of the user", "workload": "name of the workload"},
    labels_of=lambda row: (("uid", str(row.workload.uid)), ("workload", row.workload.name)),
    placeholders={
        "uid": ("uid of the user", lambda row: str(row.workload.uid)),
        "workload": ("name of the workload", lambda row: row.workload.name),
        "live": (
            "memory allocated to the workload's programs",
            lambda row: size_text_or_unknown(row.sums["live_bytes"]),
        ),
        "held": ("memory held by the workload's pools", lambda row: size_text_or_unknown(row.sums["held_bytes"])),
        "reclaimable": (
            "bytes that a flush of the workload would release",
            lambda row: size_text_or_unknown(row.sums["reclaimable_bytes"]),
        ),
        "stranded": (
            "free memory that allocators keep and a flush can't release",
            lambda row: size_text_or_unknown(row.sums["stranded_bytes"]),
        ),
    },
)
