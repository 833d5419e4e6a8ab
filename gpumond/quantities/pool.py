"""Rules on pools, as agents report them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from gpumond.diagnosis.advice import case_of, sentence, torch_setting
from gpumond.diagnosis.detectors import FRAGMENTED_FROM
from gpumond.facts.pools import PoolUsage
from gpumond.facts.rule import Labels
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot
from gpumond.quantities.context import (
    DEVICE_LABELS,
    FROM_A_FULL_WINDOW,
    IN_WINDOW,
    NAMED,
    RuleAttribute,
    RuleContext,
    ScopeSpec,
    named,
    number,
    ratio,
    size,
)
from gpumond.quantities.table import Unit
from gpumond.quantities.window import POOL_COUNTERS, CounterTrack, RuleWindow, pool_of


class _Pool(NamedTuple):
    device: DeviceReading | None
    report: AgentReport
    pool: PoolUsage
    track: CounterTrack
    recent: RuleWindow
    snapshot: Snapshot


def pools(context: RuleContext) -> Sequence[_Pool]:
    recent, snapshot = context.recent, context.snapshot
    return [
        _Pool(snapshot.device(pool.device_uuid), report, pool, recent.pools[pool_of(process, pool)], recent, snapshot)
        for process, report in snapshot.reports_by_process.items()
        for pool in report.pools
    ]


def _pool_labels(row: _Pool) -> Labels:
    return (
        ("allocator", row.pool.allocator),
        ("gpu", "" if row.device is None else str(row.device.index)),
        ("pid", str(row.report.pid)),
        ("uuid", row.pool.device_uuid),
        ("workload", row.report.workload),
    )


def _fragmentation(device: DeviceReading | None, recent: RuleWindow, track: CounterTrack) -> float | None:
    if device is None or not device.size_bytes:
        return None
    return recent.fragmentation(track) if track.kept >= FRAGMENTED_FROM * device.size_bytes else 0.0


def _stranded(row: _Pool) -> int | None:
    return None if row.pool.live_bytes is None else row.pool.stranded_bytes


def _pool_texts(row: _Pool) -> dict[str, str]:
    device, pool = row.device, row.pool
    retried = bool(row.recent.increase(row.track.retries, row.track.since))
    return {
        **(named(device) if device else {"gpu": "?", "uuid": pool.device_uuid, "name": "?", "size": size(None)}),
        "pid": str(row.report.pid),
        "workload": row.report.workload,
        "allocator": pool.allocator,
        "live": size(pool.live_bytes),
        "held": size(pool.held_bytes),
        "reclaimable": size(pool.reclaimable.likely),
        "stranded": size(_stranded(row)),
        "torch_setting": torch_setting(row.report.frameworks),
        "advice": sentence(case_of(row.report, pool.device_uuid, row.snapshot, retried)),
    }


def _field(name: str, unit: Unit, meaning: str) -> RuleAttribute[_Pool]:
    value = attrgetter(name)
    return RuleAttribute(name, unit, meaning, lambda row: number(value(row.pool)))


def _counter(name: str, meaning: str) -> tuple[RuleAttribute[_Pool], RuleAttribute[_Pool]]:
    """Return the value of a counter, and that of its increase."""
    position, value = POOL_COUNTERS.index(name), attrgetter(name)
    return _field(name, "count", f"{meaning}, since the program started"), RuleAttribute(
        f"{name}_increase",
        "count",
        f"{meaning}, {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
        lambda row: row.track.counters.increase(position, value(row.pool), row.recent.elapsed),
    )


POOL = ScopeSpec(
    rows=pools,
    values=(
        _field("live_bytes", "bytes", "allocated to the program; unknown if nothing counts it"),
        RuleAttribute("held_bytes", "bytes", "held by the pool", lambda row: row.pool.held_bytes),
        RuleAttribute(
            "reclaimable_bytes", "bytes", "bytes that a flush would release", lambda row: row.pool.reclaimable.likely
        ),
        RuleAttribute("stranded_bytes", "bytes", "held and free, but not released by a flush", _stranded),
        RuleAttribute(
            "unmapped_bytes",
            "bytes",
            "counted by the allocator while their pages are released (sleep mode)",
            lambda row: row.pool.unmapped_bytes,
        ),
        RuleAttribute(
            "stranded_ratio",
            "ratio",
            "stranded bytes over held bytes, at this moment",
            lambda row: ratio(_stranded(row), row.pool.held_bytes),
        ),
        RuleAttribute(
            "fragmentation_ratio",
            "ratio",
            f"1 - peak of live bytes over peak of the bytes that no flush releases (live and stranded), both "
            f"{IN_WINDOW}; 0 for pools below 5 % of their device; unknown for the first minute",
            lambda row: None if row.pool.live_bytes is None else _fragmentation(row.device, row.recent, row.track),
        ),
        RuleAttribute("ooms", "count", "out-of-memory errors since the program started", lambda row: row.pool.ooms),
        RuleAttribute(
            "ooms_increase",
            "count",
            f"out-of-memory errors {IN_WINDOW}, except errors after which `retry_on_oom` made another attempt; "
            f"{FROM_A_FULL_WINDOW}",
            lambda row: row.recent.ooms(row.report, row.track),
        ),
        RuleAttribute(
            "retries",
            "count",
            "allocations that succeeded only after a flush, since the program started",
            lambda row: row.pool.retries,
        ),
        RuleAttribute(
            "retries_increase",
            "count",
            f"allocations that succeeded only after a flush, {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
            lambda row: row.recent.increase(row.track.retries, row.track.since),
        ),
        _field("peak_live_bytes", "bytes", "highest number of live bytes, as the allocator counts it"),
        _field("peak_held_bytes", "bytes", "highest number of held bytes, as the allocator counts it"),
        _field("spillable_bytes", "bytes", "live bytes that the step `spill` of a flush can move to the host"),
        _field("private_bytes", "bytes", "held bytes of private pools (CUDA graphs, `MemPool`)"),
        _field("live_allocations", "count", "blocks that the program has not freed"),
        *_counter("device_allocations", "allocations from the driver"),
        *_counter("device_frees", "blocks returned to the driver"),
        *_counter("thrashes", "flushes after which the program allocated half or more of the bytes again at once"),
    ),
    labels={
        **DEVICE_LABELS,
        "pid": "pid of the process",
        "workload": "workload of the process",
        "allocator": "allocator of the pool",
    },
    labels_of=_pool_labels,
    placeholders={
        **NAMED,
        "pid": "pid of the process",
        "workload": "workload of the process",
        "allocator": "allocator of the pool",
        "live": "allocated to the program",
        "held": "held by the pool",
        "reclaimable": "bytes that a flush would release",
        "stranded": "held and free, but not released by a flush",
        "torch_setting": "environment variable that configures the allocator of its PyTorch",
        "advice": "settings and changes that apply to the program, each after a semicolon; empty if none does",
    },
    texts=_pool_texts,
    programs=lambda row: (row.report.workload,),
    process=lambda row: row.report.key,
)
