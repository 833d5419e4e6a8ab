"""What rules look at: the subjects of each scope in one snapshot, with the values of ``values.VALUES``. Pure.

A value that is unknown is None: a rule on it then neither fires nor resolves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from gpumond.attribution import outermost
from gpumond.model import (
    MISSED_LIMIT,
    RELEASED,
    STARTING,
    AgentReport,
    DeviceReading,
    Ledger,
    PoolUsage,
    ProcessUsage,
    Share,
    Snapshot,
    Verdict,
)
from gpumond.rules import Hidden, Labels, Scope, Subject
from gpumond.rules.recent import WINDOW_SECONDS, Identity, Recent, Track, pool_of
from gpumond.rules.values import VALUES as VALUES
from gpumond.rules.verdicts import NOTHING, UNKNOWN, Standing, texts
from gpumond.rules.verdicts import values as verdicts_of
from gpumond.units import human

NEARLY_FULL = 0.80
FRAGMENTED_FROM = 0.05
"""Share of the device that a pool must keep before its fragmentation is worth a word."""
NOBODY = ProcessUsage(0, None, None)
"""What a device holds and no process can be told for."""


class Seen(NamedTuple):
    """All that a rule's values are made of."""

    snapshot: Snapshot
    ledger: Ledger
    recent: Recent
    standing: Standing = MappingProxyType({})


def subjects(scope: Scope, seen: Seen) -> Iterator[Subject]:
    return _SCOPES[scope](seen)


def hidden(snapshot: Snapshot, recent: Recent) -> Hidden:
    """Devices that did not answer, and processes that live while their agent is silent."""
    silent = recent.silent
    return Hidden(
        frozenset(device.uuid for device in snapshot.devices if device.missed >= MISSED_LIMIT),
        frozenset(str(pid) for pid, _ in silent),
        frozenset(recent.agents[identity] for identity in silent),
    )


class _Holdings(NamedTuple):
    """One device's lines, summed by share, and its programs' names and caches."""

    shares: Counter[Share]
    caches: Counter[int]
    programs: dict[int, str]


def _devices(seen: Seen) -> Iterator[Subject]:
    snapshot, recent = seen.snapshot, seen.recent
    table: defaultdict[str, _Holdings] = defaultdict(lambda: _Holdings(Counter(), Counter(), {}))
    for line in seen.ledger.lines:
        own = table[line.device_uuid]
        own.shares[line.share] += line.used_bytes
        if line.pid is not None and line.share in ("cached", "opaque"):  # every process has one of them
            if line.workload:
                own.programs[line.pid] = line.workload
            if line.share == "cached":
                own.caches[line.pid] += line.used_bytes
    short, watched = _short(recent), recent.elapsed >= WINDOW_SECONDS
    judged: defaultdict[str, list[Verdict]] = defaultdict(list)
    for (uuid, _), verdicts in seen.standing.items():
        judged[uuid] += verdicts
    for device in snapshot.devices:
        own = table[device.uuid]
        known = device.used_bytes is not None
        cached, stranded, unclaimed = (own.shares[s] if known else None for s in ("cached", "stranded", "unclaimed"))
        if device.processes is None:
            unclaimed = None  # whose it is cannot be told at all
        used = _ratio(device.used_bytes, device.size_bytes)
        busy = device.sensors.gpu_utilization_ratio
        xids = {
            error.xid: recent.xids[error.device_uuid, error.xid].increase
            for error in snapshot.xids
            if error.device_uuid == device.uuid
        }
        wasted = _wasted(used, cached, own, short[device.uuid])
        yield Subject(
            (("gpu", str(device.index)), ("uuid", device.uuid)),
            {
                "up": None if snapshot.source.reason == RELEASED else float(device.up),
                "used_bytes": device.used_bytes,
                "free_bytes": device.free_bytes,
                "used_ratio": used,
                "reclaimable_bytes": cached,
                "reclaimable_ratio": _ratio(cached, device.size_bytes),
                "wasted_ratio": _ratio(wasted, device.size_bytes),
                "stranded_bytes": stranded,
                "unclaimed_bytes": unclaimed,
                "unclaimed_ratio": _ratio(unclaimed, device.size_bytes),
                "idle_used_ratio": None if busy is None else used if busy == 0 else 0.0,
                "xid_errors_increase": float(count) if (count := sum(xids.values())) or watched else None,
                **verdicts_of(judged[device.uuid], UNKNOWN if device.missed >= MISSED_LIMIT else NOTHING),
            },
            partial(_device_texts, device, own, cached, stranded, unclaimed, xids, judged[device.uuid]),
            tuple(own.programs.values()),
        )


def _short(recent: Recent) -> Mapping[str, set[int]]:
    """By device, the processes that ran out of memory, or needed a retry, within the window."""
    short: defaultdict[str, set[int]] = defaultdict(set)
    for (pid, _, _, uuid), track in recent.pools.items():
        if track.short:
            short[uuid].add(pid)
    return short


def _wasted(used: float | None, cached: int | None, own: _Holdings, short: set[int]) -> int | None:
    if cached is None or used is None or used >= NEARLY_FULL:
        return cached
    return max((cached - own.caches[pid] for pid in short), default=0)


def _processes(seen: Seen) -> Iterator[Subject]:
    recent, standing = seen.recent, seen.standing
    for device in seen.snapshot.devices:
        for process in device.processes or ():
            identity: Identity = (process.pid, process.start_ticks)
            workload, silent = recent.agents.get(identity), identity in recent.silent
            own = standing.get((device.uuid, process.pid), ())
            yield Subject(
                _process_labels(device.index, process.pid, device.uuid),
                {
                    "used_bytes": process.used_bytes,
                    "used_ratio": _ratio(process.used_bytes, device.size_bytes),
                    "agent_gone": None if workload is None else float(silent),
                    **verdicts_of(own, UNKNOWN if silent else NOTHING),
                },
                partial(_process_texts, device, process, workload or "", own),
                (workload or "", process.comm or ""),
            )
        whole = standing.get((device.uuid, None), ())
        yield Subject(
            (("gpu", str(device.index)), ("pid", ""), ("uuid", device.uuid)),
            verdicts_of(whole, UNKNOWN if device.missed >= MISSED_LIMIT else NOTHING),
            partial(_process_texts, device, NOBODY, "", whole),
        )


def _pools(seen: Seen) -> Iterator[Subject]:
    snapshot, recent = seen.snapshot, seen.recent
    devices = {device.uuid: device for device in snapshot.devices}
    for report in snapshot.reports:
        for pool in report.pools:
            device, track = devices.get(pool.device_uuid), recent.pools[pool_of(report, pool)]
            index = device.index if device else None
            yield Subject(
                _pool_labels(pool.allocator, index, report.pid, pool.device_uuid, report.workload),
                {
                    "live_bytes": pool.live_bytes,
                    "held_bytes": pool.held_bytes,
                    "reclaimable_bytes": pool.reclaimable.likely,
                    "stranded_bytes": pool.stranded_bytes,
                    "stranded_ratio": _ratio(pool.stranded_bytes, pool.held_bytes),
                    "fragmentation_ratio": _fragmentation(device, recent, track),
                    "ooms": pool.ooms,
                    "ooms_increase": recent.increase(track.ooms, track.since) if track.ooms else None,
                    "retries": pool.retries,
                    "retries_increase": recent.increase(track.retries, track.since) if track.retries else None,
                },
                partial(_pool_texts, device, report, pool),
            )


# Labels are the same from tick to tick.
@lru_cache(16_384)
def _process_labels(index: int, pid: int, uuid: str) -> Labels:
    return ("gpu", str(index)), ("pid", str(pid)), ("uuid", uuid)


@lru_cache(16_384)
def _pool_labels(allocator: str, index: int | None, pid: int, uuid: str, workload: str) -> Labels:
    gpu = "" if index is None else str(index)
    return ("allocator", allocator), ("gpu", gpu), ("pid", str(pid)), ("uuid", uuid), ("workload", workload)


def _fragmentation(device: DeviceReading | None, recent: Recent, track: Track) -> float | None:
    if device is None or not device.size_bytes:
        return None
    return recent.fragmentation(track) if track.kept >= FRAGMENTED_FROM * device.size_bytes else 0.0


def _workloads(seen: Seen) -> Iterator[Subject]:
    snapshot, recent = seen.snapshot, seen.recent
    partly = {recent.agents[identity] for identity in recent.silent}
    named: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for report in snapshot.reports:
        if report.workload:
            sums = named[report.workload]
            for pool in outermost(report.pools):
                sums[0] += pool.live_bytes
                sums[1] += pool.held_bytes
                sums[2] += pool.reclaimable.likely
                sums[3] += pool.stranded_bytes
    for workload, sums in named.items():
        values = dict(zip(_SUMS, map(float, sums), strict=True))
        known: Mapping[str, float | None] = dict.fromkeys(_SUMS) if workload in partly else values
        yield Subject((("workload", workload),), known, partial(_workload_texts, workload, values))


_SUMS = ("live_bytes", "held_bytes", "reclaimable_bytes", "stranded_bytes")


def _daemon(seen: Seen) -> Iterator[Subject]:
    snapshot = seen.snapshot
    source, writable = snapshot.source, snapshot.store_writable
    values = {
        "driver_up": None if source.reason in (STARTING, RELEASED) else float(source.up),
        "driver_responsive": float(source.responsive),
        "agents": float(len(snapshot.reports)),
        "store_writable": None if writable is None else float(writable),
    }
    yield Subject((), values, lambda: {"reason": source.detail or source.reason})


def _device_texts(
    device: DeviceReading,
    own: _Holdings,
    cached: int | None,
    stranded: int | None,
    unclaimed: int | None,
    xids: Mapping[int, int],
    verdicts: Sequence[Verdict],
) -> dict[str, str]:
    top = max(device.processes or (), key=lambda process: process.used_bytes or 0, default=None)
    name = "" if top is None else own.programs.get(top.pid) or top.comm or "unknown program"
    pid = max(own.caches, key=lambda pid: own.caches[pid], default=None)
    comms = {process.pid: process.comm for process in device.processes or ()}
    cache = "" if pid is None else own.programs.get(pid) or comms.get(pid) or "unknown program"
    return {
        **_named(device),
        "used": _size(device.used_bytes),
        "free": _size(device.free_bytes),
        "reclaimable": _size(cached),
        "stranded": _size(stranded),
        "unclaimed": _size(unclaimed),
        "top_process": f"{name} (pid {top.pid}, {_size(top.used_bytes)})" if top else "no visible process",
        "top_cache": f"{cache} (pid {pid}, {_size(own.caches[pid])})"
        if pid is not None
        else "no program with an agent",
        "xids": ", ".join(f"{xid} ({count} times)" for xid, count in sorted(xids.items()) if count),
        **texts(verdicts),
    }


def _process_texts(
    device: DeviceReading, process: ProcessUsage, workload: str, verdicts: Sequence[Verdict]
) -> dict[str, str]:
    return {
        **_named(device),
        **texts(verdicts),
        "pid": str(process.pid),
        "comm": process.comm or "unknown program",
        "workload": workload,
        "used": _size(process.used_bytes),
        "state": process.state or "unknown",
    }


def _pool_texts(device: DeviceReading | None, report: AgentReport, pool: PoolUsage) -> dict[str, str]:
    return {
        **(_named(device) if device else {"gpu": "?", "uuid": pool.device_uuid, "name": "?", "size": _size(None)}),
        "pid": str(report.pid),
        "workload": report.workload,
        "allocator": pool.allocator,
        "live": _size(pool.live_bytes),
        "held": _size(pool.held_bytes),
        "reclaimable": _size(pool.reclaimable.likely),
        "stranded": _size(pool.stranded_bytes),
    }


def _workload_texts(workload: str, sums: Mapping[str, float]) -> dict[str, str]:
    return {"workload": workload, **{name.removesuffix("_bytes"): _size(value) for name, value in sums.items()}}


def _named(device: DeviceReading) -> dict[str, str]:
    return {
        "gpu": str(device.index),
        "uuid": device.uuid,
        "name": device.name,
        "size": _size(device.size_bytes),
    }


def _size(value: float | None) -> str:
    return "an unknown amount" if value is None else human(value)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


_SCOPES: Mapping[Scope, Callable[[Seen], Iterator[Subject]]] = {
    "device": _devices,
    "process": _processes,
    "pool": _pools,
    "workload": _workloads,
    "daemon": _daemon,
}
