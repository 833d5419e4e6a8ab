"""What rules look at: the subjects of each scope in one snapshot, with their documented values. Pure.

A value that is unknown is None: a rule on it then neither fires nor resolves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from gpumond.model import (
    MISSED_LIMIT,
    RELEASED,
    AgentReport,
    DeviceReading,
    Ledger,
    PoolUsage,
    ProcessUsage,
    Share,
    Snapshot,
)
from gpumond.rules import Scope, Subject
from gpumond.units import human

VALUES: Mapping[Scope, Mapping[str, str]] = {
    "device": {
        "up": "1 while the device answers its driver, else 0",
        "used_bytes": "memory in use, without the driver's own reservation",
        "free_bytes": "memory free according to the driver",
        "used_ratio": "used bytes over size",
        "reclaimable_bytes": "what a flush of all programs on it would return",
        "reclaimable_ratio": "reclaimable bytes over size",
        "stranded_bytes": "held and free in pools, and out of a flush's reach",
        "unclaimed_bytes": "used, and no visible process owns it",
        "unclaimed_ratio": "unclaimed bytes over size",
    },
    "process": {
        "used_bytes": "the driver's count for the process on the device",
        "used_ratio": "used bytes over the device's size",
    },
    "pool": {
        "live_bytes": "handed out to the program",
        "held_bytes": "taken from the driver",
        "reclaimable_bytes": "what a flush would return",
        "stranded_bytes": "held and free, and out of a flush's reach",
        "stranded_ratio": "stranded bytes over held bytes",
        "ooms": "out-of-memory errors since the program started",
        "retries": "allocations that succeeded only after a flush, since the program started",
    },
    "workload": {
        "live_bytes": "handed out to the programs of that name",
        "reclaimable_bytes": "what a flush of them would return",
        "stranded_bytes": "held and free, and out of a flush's reach",
    },
    "daemon": {
        "driver_up": "1 while the driver can be read, else 0",
        "driver_responsive": "0 while a driver call is overdue, else 1",
        "agents": "programs with an agent",
    },
}

Shares = Mapping[tuple[str, Share], int]


def subjects(scope: Scope, snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    return _SCOPES[scope](snapshot, ledger)


def hidden(snapshot: Snapshot) -> frozenset[str]:
    """UUIDs of the devices that cannot be seen now: they did not answer, and nobody said that they are gone."""
    return frozenset(device.uuid for device in snapshot.devices if device.missed >= MISSED_LIMIT)


def _devices(snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    shares: defaultdict[tuple[str, Share], int] = defaultdict(int)
    for line in ledger.lines:
        shares[line.device_uuid, line.share] += line.used_bytes
    released = snapshot.source.reason == RELEASED
    for device in snapshot.devices:
        known = device.used_bytes is not None
        cached, stranded, unclaimed = (
            shares[device.uuid, share] if known else None for share in ("cached", "stranded", "unclaimed")
        )
        yield Subject(
            (("gpu", str(device.index)), ("uuid", device.uuid)),
            {
                "up": None if released else float(device.up),
                "used_bytes": device.used_bytes,
                "free_bytes": device.free_bytes,
                "used_ratio": _ratio(device.used_bytes, device.size_bytes),
                "reclaimable_bytes": cached,
                "reclaimable_ratio": _ratio(cached, device.size_bytes),
                "stranded_bytes": stranded,
                "unclaimed_bytes": unclaimed,
                "unclaimed_ratio": _ratio(unclaimed, device.size_bytes),
            },
            partial(_device_texts, device, cached, unclaimed),
        )


def _processes(snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    for device in snapshot.devices:
        for process in device.processes or ():
            yield Subject(
                (("gpu", str(device.index)), ("pid", str(process.pid)), ("uuid", device.uuid)),
                {"used_bytes": process.used_bytes, "used_ratio": _ratio(process.used_bytes, device.size_bytes)},
                partial(_process_texts, device, process),
            )


def _pools(snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    for report in snapshot.reports:
        for pool in report.pools:
            yield Subject(
                (
                    ("allocator", pool.allocator),
                    ("pid", str(report.pid)),
                    ("uuid", pool.device_uuid),
                    ("workload", report.workload),
                ),
                {
                    "live_bytes": pool.live_bytes,
                    "held_bytes": pool.held_bytes,
                    "reclaimable_bytes": pool.reclaimable.likely,
                    "stranded_bytes": pool.stranded_bytes,
                    "stranded_ratio": _ratio(pool.stranded_bytes, pool.held_bytes),
                    "ooms": pool.ooms,
                    "retries": pool.retries,
                },
                partial(_pool_texts, report, pool),
            )


def _workloads(snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    named: defaultdict[str, list[PoolUsage]] = defaultdict(list)
    for report in snapshot.reports:
        if report.workload:
            named[report.workload] += report.pools
    for workload, pools in named.items():
        values = {
            "live_bytes": _sum(pool.live_bytes for pool in pools),
            "reclaimable_bytes": _sum(pool.reclaimable.likely for pool in pools),
            "stranded_bytes": _sum(pool.stranded_bytes for pool in pools),
        }
        yield Subject((("workload", workload),), values, partial(_workload_texts, workload, values))


def _daemon(snapshot: Snapshot, ledger: Ledger) -> Iterator[Subject]:
    source = snapshot.source
    values: dict[str, float | None] = {
        "driver_up": None if source.reason == RELEASED else float(source.up),
        "driver_responsive": float(source.responsive),
        "agents": float(len(snapshot.reports)),
    }
    yield Subject((), values, lambda: {"reason": source.detail or source.reason})


def _device_texts(device: DeviceReading, cached: int | None, unclaimed: int | None) -> dict[str, str]:
    return {
        "gpu": str(device.index),
        "uuid": device.uuid,
        "name": device.name,
        "size": _size(device.size_bytes),
        "used": _size(device.used_bytes),
        "reclaimable": _size(cached),
        "unclaimed": _size(unclaimed),
    }


def _process_texts(device: DeviceReading, process: ProcessUsage) -> dict[str, str]:
    return {
        "gpu": str(device.index),
        "uuid": device.uuid,
        "name": device.name,
        "pid": str(process.pid),
        "comm": process.comm or "?",
        "used": _size(process.used_bytes),
    }


def _pool_texts(report: AgentReport, pool: PoolUsage) -> dict[str, str]:
    return {
        "uuid": pool.device_uuid,
        "pid": str(report.pid),
        "workload": report.workload,
        "allocator": pool.allocator,
        "held": _size(pool.held_bytes),
        "reclaimable": _size(pool.reclaimable.likely),
    }


def _workload_texts(workload: str, values: Mapping[str, float]) -> dict[str, str]:
    return {"workload": workload, "reclaimable": _size(values["reclaimable_bytes"])}


def _size(value: float | None) -> str:
    return "an unknown amount" if value is None else human(value)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _sum(values: Iterable[int]) -> float:
    return float(sum(values))


_SCOPES: Mapping[Scope, Callable[[Snapshot, Ledger], Iterator[Subject]]] = {
    "device": _devices,
    "process": _processes,
    "pool": _pools,
    "workload": _workloads,
    "daemon": _daemon,
}
