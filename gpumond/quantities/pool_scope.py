"""Rules on pools, as agents report them. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumond.diagnosis.advice import advice_clauses, context_of, torch_setting, whole_block_change
from gpumond.diagnosis.detectors import FRAGMENTED_MIN_SIZE_RATIO, unreclaimable_bytes
from gpumond.events import oom_text
from gpumond.facts.alerts import Labels
from gpumond.facts.pools import PoolUsage
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot
from gpumond.facts.units import size_text
from gpumond.quantities.program_quantities import POOL_COUNTERS, POOL_QUANTITIES as QUANTITIES, STRANDED
from gpumond.quantities.quantity import Quantity
from gpumond.quantities.scope import (
    DEVICE_LABELS,
    FULL_WINDOW_NOTE,
    IN_WINDOW,
    RuleContext,
    ScopeSpec,
    increase_quantity,
    ratio,
    size_text_or_unknown,
)
from gpumond.quantities.window import OomNote, PoolTrack, RuleWindow, pool_key

SURVIVAL_SECONDS = 5.0
"""Time after an out-of-memory error from which a program that reports has survived it."""


class _PoolRow(NamedTuple):
    device: DeviceReading | None
    report: AgentReport
    pool: PoolUsage
    track: PoolTrack
    window: RuleWindow
    snapshot: Snapshot


def pool_rows(context: RuleContext) -> Sequence[_PoolRow]:
    window, snapshot = context.window, context.snapshot
    return [
        _PoolRow(
            snapshot.device(pool.device_uuid),
            report,
            pool,
            window.pool_tracks[pool_key(process, pool)],
            window,
            snapshot,
        )
        for process, report in snapshot.reports_by_process.items()
        for pool in report.pools
    ]


def _pool_labels(row: _PoolRow) -> Labels:
    return (
        ("allocator", row.pool.allocator),
        ("gpu", "" if row.device is None else str(row.device.index)),
        ("pid", str(row.report.pid)),
        ("uuid", row.pool.device_uuid),
        ("workload", row.report.workload),
    )


def _fragmentation_ratio(row: _PoolRow) -> float | None:
    device, track = row.device, row.track
    if device is None or not device.size_bytes:
        return None
    unreclaimable = min(track.peak_unreclaimable_bytes, unreclaimable_bytes(row.pool))
    is_fragmented = STRANDED.read(row.pool) and unreclaimable >= FRAGMENTED_MIN_SIZE_RATIO * device.size_bytes
    return row.window.fragmentation_ratio(track) if is_fragmented else 0.0


def _advice_text(row: _PoolRow) -> str:
    retried = bool(row.window.increase(row.track.retries, row.track.since))
    return advice_clauses(context_of(row.report, row.pool.device_uuid, row.snapshot, retried))


def _whole_blocks(row: _PoolRow) -> str:
    context = context_of(row.report, row.pool.device_uuid, row.snapshot)
    return whole_block_change(row.pool.allocator, context) or "allocate fewer different sizes"


def _last_oom_text(row: _PoolRow) -> str:
    """Return the event of the program's last out-of-memory error on the device, with the program's own line, and
    whether it kept running: it still reports after some seconds, in which the error may have ended it.
    """
    of_device = (oom for oom in row.report.program.ooms if oom.device_uuid in (None, row.pool.device_uuid))
    newest = max(of_device, key=lambda oom: oom.number, default=None)
    if newest is None:
        return ""
    note = row.window.oom_notes.get((row.report.key, newest.number), OomNote())
    keeps_running = (
        newest.seen != "unhandled" and row.snapshot.taken_at - row.report.age_seconds - newest.at >= SURVIVAL_SECONDS
    )
    return oom_text(newest, note.limit_bytes) + note.code_line + (" and kept running" if keeps_running else "")


def _shortage_text(row: _PoolRow) -> str:
    limit = row.track.limit_bytes
    if limit is None:
        return "was short of memory"
    unchanged = row.snapshot.limits.get((row.pool.device_uuid, row.report.key)) == limit
    return f"reached its limit of {size_text(limit)}" + ("" if unchanged else ", which has changed since")


def _relief_text(row: _PoolRow) -> str:
    if row.track.limit_bytes is None:
        return "free memory on the GPU"
    return "raise the program's limit (to see where it's set: gpumond quota)"


def _values(*names: str) -> Iterator[Quantity[_PoolRow]]:
    """Yield the quantities of these names, those of counters with their increases."""
    for name in names:
        value = QUANTITIES_BY_NAME[name]
        yield value
        if name in POOL_COUNTERS:
            yield increase_quantity(value, POOL_COUNTERS.index(name), lambda row: row.track.counters)


QUANTITIES_BY_NAME: dict[str, Quantity[_PoolRow]] = {
    each.name: each.of_part(lambda row: row.pool) for each in QUANTITIES
}

POOL_SCOPE = ScopeSpec(
    rows=pool_rows,
    quantities=(
        *_values("live_bytes", "held_bytes", "reclaimable_bytes", "stranded_bytes", "unmapped_bytes"),
        Quantity(
            "stranded_ratio",
            "current stranded bytes as a fraction of the held bytes",
            lambda row: ratio(STRANDED.read(row.pool), row.pool.held_bytes),
        ),
        Quantity(
            "fragmentation_ratio",
            f"1 - peak live bytes / peak of live and stranded bytes, both {IN_WINDOW}; unknown for the first minute; "
            "0 if nothing is stranded, or if live and stranded bytes are less than 5% of the device's size",
            lambda row: None if row.pool.live_bytes is None else _fragmentation_ratio(row),
        ),
        *_values("ooms"),
        Quantity(
            "ooms_increase",
            f"increase of `ooms` {IN_WINDOW}, without errors after which `retry_on_oom` tried again; "
            f"{FULL_WINDOW_NOTE}",
            lambda row: row.window.oom_increase(row.report, row.track),
        ),
        *_values("retries"),
        Quantity(
            "retries_increase",
            f"increase of `retries` {IN_WINDOW}; {FULL_WINDOW_NOTE}",
            lambda row: row.window.increase(row.track.retries, row.track.since),
        ),
        *_values("peak_live_bytes", "peak_held_bytes", "spillable_bytes", "private_bytes", "live_allocations"),
        *_values("device_allocations", "device_frees", "refilled_flushes"),
    ),
    label_meanings={
        **DEVICE_LABELS,
        "pid": "the process's pid",
        "workload": "the process's workload",
        "allocator": "allocator of the pool",
    },
    labels_of=_pool_labels,
    placeholders={
        "gpu": (DEVICE_LABELS["gpu"], lambda row: str(row.device.index) if row.device else "?"),
        "uuid": (DEVICE_LABELS["uuid"], lambda row: row.pool.device_uuid),
        "name": ("model of the device", lambda row: row.device.name if row.device else "?"),
        "size": (
            "memory of the device",
            lambda row: size_text_or_unknown(row.device.size_bytes if row.device else None),
        ),
        "pid": ("the process's pid", lambda row: str(row.report.pid)),
        "workload": ("the process's workload", lambda row: row.report.workload),
        "allocator": ("allocator of the pool", lambda row: row.pool.allocator),
        "live": ("memory allocated to the program", lambda row: size_text_or_unknown(row.pool.live_bytes)),
        "held": ("memory held by the pool", lambda row: size_text_or_unknown(row.pool.held_bytes)),
        "reclaimable": (
            "bytes that a flush would release",
            lambda row: size_text_or_unknown(row.pool.reclaimable.likely),
        ),
        "stranded": (
            "free memory that the allocator keeps and a flush can't release",
            lambda row: size_text_or_unknown(STRANDED.read(row.pool)),
        ),
        "torch_setting": (
            "environment variable that configures the allocator of the program's PyTorch version",
            lambda row: torch_setting(row.report.frameworks),
        ),
        "whole_blocks": ("a change that keeps the pool's free memory in one piece", _whole_blocks),
        "advice": (
            "recommended settings and changes, each preceded by a semicolon; empty without any",
            _advice_text,
        ),
        "shortage": ("whether the program was short of memory or reached its own limit", _shortage_text),
        "relief": ("what would give the program more memory", _relief_text),
        "oom": (
            "the last out-of-memory error: what happened, at which line of code, and whether the program kept running; "
            "empty if unknown",
            _last_oom_text,
        ),
    },
    programs=lambda row: (row.report.workload,),
    process=lambda row: row.report.key,
)
