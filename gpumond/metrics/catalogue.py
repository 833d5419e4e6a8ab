"""Catalogue of the metrics that derive from a Frame.

No state is kept between frames: the series of a device, process or pool that no longer exists are absent from the next
scrape, and an unknown value is an absent series. To add a metric, add a Family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import SHARES, Frame
from gpumond.facts.shares import MEANINGS
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.verdicts import KINDS, SHAPES
from gpumond.metrics import devices, programs
from gpumond.metrics.families import Family, Row, families, family
from gpumond.quantities.table import DRIVER_RESPONSIVE, DRIVER_UP, ENGINE, ENGINE_USED
from gpumond.tick.conditions import OF_DEVICES, conditions


def _ledger(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    sums: Counter[tuple[str, str, str, str]] = Counter()
    for line in frame.ledger.lines:
        sums[line.device_uuid, index[line.device_uuid], line.workload, line.share] += line.used_bytes
    yield from sums.items()


def _overcount(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for entry in frame.ledger.overcounts:
        yield (entry.device_uuid, index[entry.device_uuid]), entry.overcount_bytes


def _verdicts(frame: Frame) -> Iterator[Row]:
    """Yield the verdicts except shapes: each program has one at any time, and a new series for each change."""
    index = frame.snapshot.gpu_labels
    for verdict in frame.verdicts:
        if verdict.kind not in SHAPES:
            yield (verdict.device_uuid, index.get(verdict.device_uuid, ""), str(verdict.pid or ""), verdict.kind), 1


def _time_to_oom(frame: Frame) -> Iterator[Row]:
    """Yield the lowest estimate if several verdicts apply to the same process."""
    index = frame.snapshot.gpu_labels
    times: dict[tuple[str, str, str], float] = {}
    for verdict in frame.verdicts:
        if (seconds := verdict.time_to_oom_seconds) is not None:
            labels = (verdict.device_uuid, index.get(verdict.device_uuid, ""), str(verdict.pid or ""))
            times[labels] = min(seconds, times.get(labels, seconds))
    yield from times.items()


def _alerts(frame: Frame) -> Iterator[Row]:
    yield from Counter((alert.rule, alert.phase) for alert in frame.alerts).items()


def _agents(frame: Frame) -> Iterator[Row]:
    yield from Counter((report.workload,) for report in frame.snapshot.reports if report.uses_device).items()


def _engines(frame: Frame) -> Iterator[tuple[tuple[str, ...], EngineReading]]:
    for engine in frame.snapshot.engines:
        yield (engine.name, engine.kind), engine


def _engine_memory(frame: Frame) -> Iterator[Row]:
    """Yield the driver's count of each engine's processes on each device; unknown if the driver reports none."""
    for engine in frame.snapshot.engines:
        for device, used in frame.snapshot.used_by_engine(engine):
            yield (device.uuid, str(device.index), engine.name, engine.kind), used


def _snapshot(frame: Frame) -> Iterator[tuple[tuple[str, ...], Snapshot]]:
    yield (), frame.snapshot


def _driver_down_reason(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    if not source.up:
        yield (source.reason,), 1


def _conditions(frame: Frame) -> Iterator[Row]:
    index = frame.snapshot.gpu_labels
    for uuid, kind in dict.fromkeys((each.device_uuid, each.kind) for each in conditions(frame.snapshot)):
        if uuid is not None:
            yield (uuid, index[uuid], kind), 1


def _private(frame: Frame) -> Iterator[Row]:
    yield (), frame.snapshot.private_pid_namespace


def _driver_info(frame: Frame) -> Iterator[Row]:
    source = frame.snapshot.source
    versions = (source.driver_version, source.library_version, source.cuda_version)
    if any(versions):
        yield (source.name, *(version or "" for version in versions)), 1


FAMILIES: tuple[Family, ...] = (  # Families of programs are last: a page at the series limit drops these first.
    *devices.FAMILIES,
    Family(
        "gpumond_memory_bytes",
        "gauge",
        f"Used memory by workload and share ({', '.join(SHARES)}). Overhead: {MEANINGS['overhead']} "
        f"Opaque: {MEANINGS['opaque']} Unattributed: {MEANINGS['unattributed']} "
        "The sum per device is gpumond_device_memory_used_bytes + gpumond_memory_overcount_bytes.",
        ("uuid", "gpu", "workload", "share"),
        _ledger,
    ),
    Family(
        "gpumond_memory_overcount_bytes",
        "gauge",
        MEANINGS["overcount"],
        ("uuid", "gpu"),
        _overcount,
    ),
    *programs.OF_PROCESSES,
    Family(
        "gpumond_verdict",
        "gauge",
        "1 for each active verdict; healthy patterns are only in /api/v1/verdicts. Kinds: "
        f"{', '.join(kind.name for kind in KINDS if not kind.is_shape)}.",
        ("uuid", "gpu", "pid", "kind"),
        _verdicts,
    ),
    Family(
        "gpumond_time_to_oom_seconds",
        "gauge",
        "Estimated time until the device memory is full at the current rate of growth.",
        ("uuid", "gpu", "pid"),
        _time_to_oom,
    ),
    Family("gpumond_alerts", "gauge", "Number of active alerts by rule and phase.", ("rule", "phase"), _alerts),
    Family(
        "gpumond_agents",
        "gauge",
        "Number of programs with an agent that use, or have used, a device.",
        ("workload",),
        _agents,
    ),
    *families("gpumond_engine_", ("engine", "kind"), _engines, ENGINE),
    family("gpumond_engine_", ("uuid", "gpu", "engine", "kind"), ENGINE_USED, _engine_memory),
    *families("gpumond_", (), _snapshot, (DRIVER_UP,)),
    Family(
        "gpumond_driver_down_reason",
        "gauge",
        "1 for the reason why the devices cannot be read: starting, released, no_device (the machine has none), or the "
        "kind of a fault. Absent while they can be read.",
        ("reason",),
        _driver_down_reason,
    ),
    *families("gpumond_", (), _snapshot, (DRIVER_RESPONSIVE,)),
    Family(
        "gpumond_driver_info",
        "gauge",
        "Versions of the driver, its library, and the latest CUDA release that it supports.",
        ("source", "driver_version", "library_version", "cuda_version"),
        _driver_info,
    ),
    Family(
        "gpumond_device_condition",
        "gauge",
        f"1 for each condition that limits the accuracy of the device's values: {', '.join(sorted(OF_DEVICES))}.",
        ("uuid", "gpu", "condition"),
        _conditions,
    ),
    Family(
        "gpumond_private_pid_namespace",
        "gauge",
        "1 if the daemon runs in its own PID namespace, where the driver's pids may refer to other processes; else 0.",
        (),
        _private,
    ),
    Family(
        "gpumond_snapshot_timestamp_seconds",
        "gauge",
        "Unix time at which the snapshot was taken.",
        (),
        lambda frame: [((), frame.snapshot.taken_at)],
    ),
    *programs.OF_REPORTS,
)
