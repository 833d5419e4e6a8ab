"""Rules on pools, as agents report them. No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gpumond.model.pools import PoolUsage
from gpumond.model.snapshot import AgentReport, DeviceReading
from gpumond.rules import Labels, Subjects
from gpumond.rules.scopes.context import RuleContext, named, ratio, size
from gpumond.rules.window import CounterTrack, RuleWindow, pool_of

ALLOC_CONF_SINCE = (2, 11)
"""PyTorch 2.9 knows ``PYTORCH_ALLOC_CONF``, but ignores its ``expandable_segments`` for CUDA; 2.11 obeys it."""

FRAGMENTED_FROM = 0.05
"""Share of the device that a pool must keep before its fragmentation is reported."""


class _Pool(NamedTuple):
    device: DeviceReading | None
    report: AgentReport
    pool: PoolUsage
    track: CounterTrack


def pools(seen: RuleContext) -> Subjects[_Pool]:
    recent, snapshot = seen.recent, seen.snapshot
    return Subjects(
        rows=[
            _Pool(snapshot.device(pool.device_uuid), report, pool, recent.pools[pool_of(process, pool)])
            for process, report in snapshot.reports_by_process.items()
            for pool in report.pools
        ],
        values={
            "live_bytes": lambda row: row.pool.live_bytes,
            "held_bytes": lambda row: row.pool.held_bytes,
            "reclaimable_bytes": lambda row: row.pool.reclaimable.likely,
            "stranded_bytes": lambda row: row.pool.stranded_bytes,
            "stranded_ratio": lambda row: ratio(row.pool.stranded_bytes, row.pool.held_bytes),
            "fragmentation_ratio": lambda row: _fragmentation(row.device, recent, row.track),
            "ooms": lambda row: row.pool.ooms,
            "ooms_increase": lambda row: recent.ooms(row.report, row.track),
            "retries": lambda row: row.pool.retries,
            "retries_increase": lambda row: recent.increase(row.track.retries, row.track.since),
        },
        labels=_pool_labels,
        texts=_pool_texts,
        programs=lambda row: (row.report.workload,),
        process=lambda row: row.report.key,
    )


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


def _pool_texts(row: _Pool) -> dict[str, str]:
    device, pool = row.device, row.pool
    return {
        **(named(device) if device else {"gpu": "?", "uuid": pool.device_uuid, "name": "?", "size": size(None)}),
        "pid": str(row.report.pid),
        "workload": row.report.workload,
        "allocator": pool.allocator,
        "live": size(pool.live_bytes),
        "held": size(pool.held_bytes),
        "reclaimable": size(pool.reclaimable.likely),
        "stranded": size(pool.stranded_bytes),
        "torch_setting": torch_setting(row.report.frameworks),
    }


def torch_setting(frameworks: Sequence[str]) -> str:
    """Return the environment variable that configures the allocator of the PyTorch that an agent reports.

    It is the older name where the version is unknown: every version reads it.
    """
    for framework in frameworks:
        found = re.match(r"torch (\d{1,3})\.(\d{1,3})", framework)
        if found and (int(found[1]), int(found[2])) >= ALLOC_CONF_SINCE:
            return "PYTORCH_ALLOC_CONF"
    return "PYTORCH_CUDA_ALLOC_CONF"
