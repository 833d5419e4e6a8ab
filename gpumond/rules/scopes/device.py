"""Rules on devices. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.model.claims import borne_out, complete_lists, listed
from gpumond.model.frame import Line, Verdict
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import RELEASED, DeviceReading, Snapshot
from gpumond.model.units import counted
from gpumond.rules import Subjects
from gpumond.rules.scopes.context import VERDICTS, RuleContext, named, ratio, size, unjudged
from gpumond.rules.verdicts import texts, values
from gpumond.rules.window import WINDOW_SECONDS, RuleWindow

NEARLY_FULL = 0.80


class _Device(NamedTuple):
    """One device. ``lines`` are its part of the ledger, ``short`` its processes that recently ran short of memory."""

    device: DeviceReading
    lines: Sequence[Line]
    cached: int | None
    stranded: int | None
    unclaimed: int | None
    used_ratio: float | None
    short: set[ProcessKey]
    xids: Mapping[int, int]
    verdicts: Sequence[Verdict]
    said: Mapping[str, float | None]


def devices(seen: RuleContext) -> Subjects[_Device]:
    snapshot, recent = seen.snapshot, seen.recent
    lines: defaultdict[str, list[Line]] = defaultdict(list)
    for line in seen.ledger.lines:
        lines[line.device_uuid].append(line)
    judged: defaultdict[str, list[Verdict]] = defaultdict(list)
    for (uuid, _), verdicts in seen.standing.items():
        judged[uuid] += verdicts
    short = _short(recent, snapshot)

    def row(device: DeviceReading) -> _Device:
        uuid, known = device.uuid, device.used_bytes is not None
        sums = _sums(lines[uuid])
        xids = {e.xid: recent.xids[uuid, e.xid].increase for e in snapshot.xids if e.device_uuid == uuid}
        return _Device(
            device=device,
            lines=lines[uuid],
            cached=sums["cached"] if known else None,
            stranded=sums["stranded"] if known else None,
            # Without a process list the owner of memory is unknown.
            unclaimed=sums["unclaimed"] if known and device.processes is not None else None,
            used_ratio=ratio(device.used_bytes, device.size_bytes),
            short=short[uuid],
            xids=xids,
            verdicts=judged[uuid],
            said=values(judged[uuid], unjudged(device)),
        )

    released, watched = snapshot.source.reason == RELEASED, recent.elapsed >= WINDOW_SECONDS
    return Subjects(
        rows=tuple(map(row, snapshot.devices)),
        values={
            "up": lambda row: None if released else float(row.device.up),
            "used_bytes": lambda row: row.device.used_bytes,
            "free_bytes": lambda row: row.device.free_bytes,
            "used_ratio": lambda row: row.used_ratio,
            "reclaimable_bytes": lambda row: row.cached,
            "reclaimable_ratio": lambda row: ratio(row.cached, row.device.size_bytes),
            "wasted_ratio": lambda row: ratio(_wasted(row), row.device.size_bytes),
            "stranded_bytes": lambda row: row.stranded,
            "unclaimed_bytes": lambda row: row.unclaimed,
            "unclaimed_ratio": lambda row: ratio(row.unclaimed, row.device.size_bytes),
            "idle_used_ratio": _idle_used,
            "xid_errors_increase": lambda row: float(sum(row.xids.values())) or (0.0 if watched else None),
            **VERDICTS,
        },
        labels=lambda row: (("gpu", str(row.device.index)), ("uuid", row.device.uuid)),
        texts=_device_texts,
        programs=lambda row: _programs(row.lines),
    )


def _sums(lines: Sequence[Line]) -> Mapping[str, int]:
    sums = dict.fromkeys(("live", "cached", "stranded", "overhead", "opaque", "unclaimed"), 0)
    for line in lines:
        sums[line.share] += line.used_bytes
    return sums


def _programs(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the names of the programs on a device, each once."""
    return tuple({line.workload: None for line in lines if line.workload})


def _caches(lines: Sequence[Line]) -> dict[ProcessKey, int]:
    cached = (line for line in lines if line.share == "cached")
    return {line.process: line.used_bytes for line in cached if line.process is not None}


def _short(recent: RuleWindow, snapshot: Snapshot) -> Mapping[str, set[ProcessKey]]:
    """Return by device the processes that ran out of memory, or needed a retry, within the window.

    Where the driver's list of a device is complete, only processes in it count: they make others' caches waste.
    """
    short: defaultdict[str, set[ProcessKey]] = defaultdict(set)
    complete = complete_lists(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    counts = {device.uuid: listed(device) for device in snapshot.devices if device.uuid in complete}
    for (process, _, uuid), track in recent.pools.items():
        if track.short and (uuid not in counts or borne_out(counts[uuid], process, True)):
            short[uuid].add(process)
    return short


def _wasted(row: _Device) -> int | None:
    if row.cached is None or row.used_ratio is None or row.used_ratio >= NEARLY_FULL:
        return row.cached
    caches = _caches(row.lines) if row.short else {}
    return max((row.cached - caches.get(process, 0) for process in row.short), default=0)


def _idle_used(row: _Device) -> float | None:
    busy = row.device.sensors.gpu_utilization_ratio
    return None if busy is None else row.used_ratio if busy == 0 else 0.0


def _device_texts(row: _Device) -> dict[str, str]:
    device = row.device
    top = max(device.processes or (), key=lambda process: process.used_bytes or 0, default=None)
    cache = max((line for line in row.lines if line.share == "cached"), key=lambda line: line.used_bytes, default=None)
    return {
        **named(device),
        "used": size(device.used_bytes),
        "free": size(device.free_bytes),
        "reclaimable": size(row.cached),
        "stranded": size(row.stranded),
        "unclaimed": size(row.unclaimed),
        "top_process": _program(row, top.key, top.used_bytes) if top else "no visible process",
        "top_cache": _program(row, cache.process, cache.used_bytes)
        if cache and cache.process
        else "no program with an agent",
        "xids": ", ".join(f"{xid} ({counted(count, 'time')})" for xid, count in sorted(row.xids.items()) if count),
        **texts(row.verdicts),
    }


def _program(row: _Device, process: ProcessKey, used_bytes: int | None) -> str:
    """Return name, pid and size of a program."""
    usage = row.device.processes_by_key.get(process)
    own = (line.workload for line in row.lines if (line.pid, line.start_ticks) == process)
    name = next(own, "") or (usage and usage.comm) or "unknown program"
    return f"{name} (pid {process.pid}, {size(used_bytes)})"
