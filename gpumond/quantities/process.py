"""Rules on processes, one for each device that a process is on. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.facts.frame import Verdict
from gpumond.facts.process import TICKS_PER_SECOND
from gpumond.facts.quota import NO_QUOTA, EffectiveQuota
from gpumond.facts.rule import Labels
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.quantities.context import (
    DEVICE_LABELS,
    NAMED,
    VERDICT_TEXTS,
    VERDICTS,
    RuleAttribute,
    RuleContext,
    ScopeSpec,
    named,
    number,
    ratio,
    size,
    values_without_verdict,
)
from gpumond.quantities.program import PROGRAM
from gpumond.quantities.verdicts import NOTHING, UNKNOWN, texts, values
from gpumond.quantities.window import RuleWindow

NOBODY = ProcessUsage(pid=0, start_ticks=None, used_bytes=None)
"""Owner of memory without a known process."""


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
            known = values(verdicts, UNKNOWN if gone else NOTHING)
            workload = agents.get(key)
            name = None if workload is None else workload.name
            # Positional, because keywords take twice as long, for each process of each tick.
            rows.append(_Process(device, process, name, gone, verdicts, known, snapshot, recent, reports.get(key)))
        verdicts = active_verdicts.get((uuid, None), ())
        verdict_values = values(verdicts, values_without_verdict(device))
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


def _limit(row: _Process) -> float | None:
    return row.snapshot.limits.get((row.device.uuid, row.process.key))


def _limit_ratio(row: _Process) -> float | None:
    """Return the ratio of the pool that is closest to its limit."""
    if row.report is None or not row.report.limits:
        return None
    held = {(pool.allocator, pool.device_uuid): pool.held_bytes for pool in row.report.pools}
    limits = {(each.allocator, each.device_uuid): each.limit_bytes for each in row.report.limits}
    own = (pool for pool in limits if pool in held and pool[1] == row.device.uuid)
    return max((held[pool] / limits[pool] for pool in own), default=None)


def _excess(row: _Process) -> float | None:
    used, soft = row.process.used_bytes, row.quota.soft_bytes
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


def _process_texts(row: _Process) -> dict[str, str]:
    process = row.process
    return {
        **named(row.device),
        **texts(row.verdicts),
        "pid": str(process.pid),
        "comm": process.comm or "unknown program",
        "workload": row.workload or "",
        "used": size(process.used_bytes),
        "state": process.state or "unknown",
        "quota": row.quota.soft_quota,
        "soft_limit": "" if row.quota.soft_bytes is None else size(row.quota.soft_bytes),
        "reserve_quota": row.quota.reserve_quota,
        "reserve": "" if row.quota.reserve_bytes is None else size(row.quota.reserve_bytes),
    }


PROCESS: ScopeSpec[_Process] = ScopeSpec(
    rows=processes,
    values=(
        RuleAttribute(
            "used_bytes",
            "bytes",
            "the driver's count for the process on the device",
            lambda row: row.process.used_bytes,
        ),
        RuleAttribute(
            "used_ratio",
            "ratio",
            "used bytes over the device's size",
            lambda row: ratio(row.process.used_bytes, row.device.size_bytes),
        ),
        RuleAttribute(
            "limit_bytes",
            "bytes",
            "the lowest limit of its allocators on the device; unknown without a limit",
            _limit,
        ),
        RuleAttribute(
            "limit_ratio",
            "ratio",
            "bytes that an allocator holds over its limit, for the one closest to it; unknown without a limit",
            _limit_ratio,
        ),
        RuleAttribute(
            "soft_limit_excess_bytes",
            "bytes",
            "used bytes above the lowest soft limit of its [quotas](../how-to/quotas.md); 0 without a soft limit",
            _excess,
        ),
        RuleAttribute(
            "reserve_shortage_bytes",
            "bytes",
            "bytes of the reserve of its [quotas](../how-to/quotas.md) that it does not use and that are not free; "
            "0 without a reserve",
            _reserve_shortage,
        ),
        RuleAttribute(
            "agent_gone",
            "boolean",
            "1 if the agent of the process has stopped reporting, 0 while it reports; unknown without an agent",
            lambda row: None if row.workload is None else float(row.silent),
        ),
        RuleAttribute(
            "utilization_ratio",
            "ratio",
            "recent use of the device's busiest engine, where the driver reports it by process",
            lambda row: row.process.utilization_ratio,
        ),
        RuleAttribute(
            "idle_seconds",
            "seconds",
            "time without work on the device, as far as observed",
            lambda row: row.process.idle_seconds,
        ),
        RuleAttribute("age_seconds", "seconds", "time since the process started", _age),
        RuleAttribute(
            "orphaned",
            "boolean",
            "1 if its parent has ended and no service manager supervises it, else 0",
            lambda row: number(row.process.orphaned),
        ),
        RuleAttribute(
            "excess_bytes",
            "bytes",
            "bytes by which the claim of its agent exceeds the driver's count, else 0; unknown without an agent",
            _claim_excess,
        ),
        *PROGRAM,
        *VERDICTS,
    ),
    labels={
        **DEVICE_LABELS,
        "pid": "pid of the process; empty for verdicts on memory without a known process",
        "workload": "workload of the process, or name of its command",
    },
    labels_of=_labels,
    placeholders={
        **NAMED,
        "pid": "pid of the process",
        "comm": "name of its command",
        "workload": "workload of the process",
        "used": "the driver's count for it",
        "state": "alive, stopped, uninterruptible, zombie, gone",
        "quota": "name of the quota with its soft limit; empty without one",
        "soft_limit": "its soft limit; empty without one",
        "reserve_quota": "name of the quota with its reserve; empty without one",
        "reserve": "its reserve; empty without one",
        **VERDICT_TEXTS,
    },
    texts=_process_texts,
    programs=lambda row: (row.workload or "", row.process.comm or ""),
    process=lambda row: None if row.process is NOBODY else row.process.key,
)
