"""Rules on devices. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.model.claims import borne_out, complete_lists, listed
from gpumond.model.frame import Line, Verdict
from gpumond.model.snapshot import RELEASED, DeviceReading, ProcessUsage, Snapshot
from gpumond.model.units import counted
from gpumond.rules.scopes.context import (
    DEVICE_LABELS,
    FROM_A_FULL_WINDOW,
    IN_WINDOW,
    NAMED,
    VERDICT_TEXTS,
    VERDICTS,
    RuleAttribute,
    RuleContext,
    ScopeSpec,
    named,
    ratio,
    size,
    unjudged,
)
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
    short: set[int]
    xids: Mapping[int, int]
    verdicts: Sequence[Verdict]
    verdict_values: Mapping[str, float | None]
    released: bool
    watched: bool
    """True if a full window has been observed."""


def devices(seen: RuleContext) -> Sequence[_Device]:
    snapshot, recent = seen.snapshot, seen.recent
    lines: defaultdict[str, list[Line]] = defaultdict(list)
    for line in seen.ledger.lines:
        lines[line.device_uuid].append(line)
    judged: defaultdict[str, list[Verdict]] = defaultdict(list)
    for (uuid, _), verdicts in seen.active_verdicts.items():
        judged[uuid] += verdicts
    short = _short(recent, snapshot)
    released, watched = snapshot.source.reason == RELEASED, recent.elapsed >= WINDOW_SECONDS

    def row(device: DeviceReading) -> _Device:
        uuid, known = device.uuid, device.used_bytes is not None
        sums = _sums(lines[uuid])
        xids = {e.xid: recent.xids[uuid, e.xid].increase for e in snapshot.xids if e.device_uuid == uuid}
        return _Device(
            device,
            lines[uuid],
            sums["cached"] if known else None,
            sums["stranded"] if known else None,
            # Without a process list the owner of memory is unknown.
            sums["unclaimed"] if known and device.processes is not None else None,
            ratio(device.used_bytes, device.size_bytes),
            short[uuid],
            xids,
            judged[uuid],
            values(judged[uuid], unjudged(device)),
            released,
            watched,
        )

    return tuple(map(row, snapshot.devices))


def _sums(lines: Sequence[Line]) -> Mapping[str, int]:
    sums = dict.fromkeys(("live", "cached", "stranded", "overhead", "opaque", "unclaimed"), 0)
    for line in lines:
        sums[line.share] += line.used_bytes
    return sums


def _programs(lines: Sequence[Line]) -> dict[int, str]:
    """The names of the programs on a device, by pid."""
    return {line.pid: line.workload for line in lines if line.pid is not None and line.workload}


def _caches(lines: Sequence[Line]) -> dict[int, int]:
    return {line.pid: line.used_bytes for line in lines if line.pid is not None and line.share == "cached"}


def _short(recent: RuleWindow, snapshot: Snapshot) -> Mapping[str, set[int]]:
    """Return by device the processes that ran out of memory, or needed a retry, within the window.

    Where the driver's list of a device is complete, only processes in it count: they make others' caches waste.
    """
    short: defaultdict[str, set[int]] = defaultdict(set)
    complete = complete_lists(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
    counts = {device.uuid: listed(device) for device in snapshot.devices if device.uuid in complete}
    for (pid, start_ticks, _, uuid), track in recent.pools.items():
        if track.short and (uuid not in counts or borne_out(counts[uuid], (pid, start_ticks), True)):
            short[uuid].add(pid)
    return short


def _wasted(row: _Device) -> int | None:
    if row.cached is None or row.used_ratio is None or row.used_ratio >= NEARLY_FULL:
        return row.cached
    caches = _caches(row.lines) if row.short else {}
    return max((row.cached - caches.get(pid, 0) for pid in row.short), default=0)


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
        "top_process": _program(row, top) if top else "no visible process",
        "top_cache": _program(row, cache) if cache else "no program with an agent",
        "xids": ", ".join(f"{xid} ({counted(count, 'time')})" for xid, count in sorted(row.xids.items()) if count),
        **texts(row.verdicts),
    }


def _program(row: _Device, part: Line | ProcessUsage) -> str:
    """Return name, pid and size of a program."""
    workload = next((line.workload for line in row.lines if line.pid == part.pid), "")
    comm = next((process.comm for process in row.device.processes or () if process.pid == part.pid), None)
    return f"{workload or comm or 'unknown program'} (pid {part.pid}, {size(part.used_bytes)})"


DEVICE = ScopeSpec(
    rows=devices,
    values=(
        RuleAttribute(
            "up",
            "1 while the device answers its driver, else 0",
            lambda row: None if row.released else float(row.device.up),
        ),
        RuleAttribute(
            "used_bytes", "memory in use, without the driver's own reservation", lambda row: row.device.used_bytes
        ),
        RuleAttribute("free_bytes", "memory free according to the driver", lambda row: row.device.free_bytes),
        RuleAttribute("used_ratio", "used bytes over size", lambda row: row.used_ratio),
        RuleAttribute("reclaimable_bytes", "what a flush of all programs on it would return", lambda row: row.cached),
        RuleAttribute(
            "reclaimable_ratio",
            "reclaimable bytes over size",
            lambda row: ratio(row.cached, row.device.size_bytes),
        ),
        RuleAttribute(
            "wasted_ratio",
            "reclaimable bytes over size while the device is at least 80 % full; while a program on it ran short "
            f"{IN_WINDOW} (out of memory, or a retry), those of the other programs; else 0",
            lambda row: ratio(_wasted(row), row.device.size_bytes),
        ),
        RuleAttribute("stranded_bytes", "held and free in pools, and out of a flush's reach", lambda row: row.stranded),
        RuleAttribute(
            "unclaimed_bytes",
            "used, and no visible process owns it; unknown where the driver lists no processes",
            lambda row: row.unclaimed,
        ),
        RuleAttribute(
            "unclaimed_ratio",
            "unclaimed bytes over size",
            lambda row: ratio(row.unclaimed, row.device.size_bytes),
        ),
        RuleAttribute("idle_used_ratio", "used bytes over size while no kernel runs, 0 while one runs", _idle_used),
        RuleAttribute(
            "xid_errors_increase",
            f"XID errors that the driver reported {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
            lambda row: float(sum(row.xids.values())) or (0.0 if row.watched else None),
        ),
        *VERDICTS,
    ),
    labels={**DEVICE_LABELS, "workload": "any program on it"},
    labels_of=lambda row: (("gpu", str(row.device.index)), ("uuid", row.device.uuid)),
    placeholders={
        **NAMED,
        "used": "memory in use",
        "free": "memory free",
        "reclaimable": "what a flush would return",
        "stranded": "held, free and out of a flush's reach",
        "unclaimed": "used, and no visible process owns it",
        "top_process": "the largest process: name, pid, size",
        "top_cache": "the program with the largest cache: name, pid, size",
        "xids": "XID errors of the window, by number",
        **VERDICT_TEXTS,
    },
    texts=_device_texts,
    programs=lambda row: tuple(_programs(row.lines).values()),
)
