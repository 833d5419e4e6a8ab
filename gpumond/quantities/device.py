"""Rules on devices. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.facts.frame import Line, Verdict
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import RELEASED, DeviceReading, Snapshot
from gpumond.facts.units import counted
from gpumond.quantities import sensors
from gpumond.quantities.context import (
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
    values_without_verdict,
)
from gpumond.quantities.subjects import Texts
from gpumond.quantities.verdicts import texts, values
from gpumond.quantities.window import WINDOW_SECONDS, RuleWindow
from gpumond.tick.claims import complete_lists, is_confirmed

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
    verdict_values: Mapping[str, float | None]
    released: bool
    recent: RuleWindow

    @property
    def watched(self) -> bool:
        """True if a full window has been observed."""
        return self.recent.elapsed >= WINDOW_SECONDS


def devices(context: RuleContext) -> Sequence[_Device]:
    snapshot, recent = context.snapshot, context.recent
    lines: defaultdict[str, list[Line]] = defaultdict(list)
    for line in context.ledger.lines:
        lines[line.device_uuid].append(line)
    verdicts_by_device: defaultdict[str, list[Verdict]] = defaultdict(list)
    for (uuid, _), verdicts in context.active_verdicts.items():
        verdicts_by_device[uuid] += verdicts
    short = _short(recent, snapshot)
    released = snapshot.source.reason == RELEASED

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
            verdicts=verdicts_by_device[uuid],
            verdict_values=values(verdicts_by_device[uuid], values_without_verdict(device)),
            released=released,
            recent=recent,
        )

    return tuple(map(row, snapshot.devices))


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
    counts = {device.uuid: device.counts for device in snapshot.devices if device.uuid in complete}
    for (process, _, uuid), track in recent.pools.items():
        if track.short and (uuid not in counts or is_confirmed(counts[uuid], process, True)):
            short[uuid].add(process)
    return short


def short_users(recent: RuleWindow, snapshot: Snapshot) -> dict[str, frozenset[int]]:
    """Return the users whose programs ran short of memory, for each device that is not nearly full.

    There, `wasted_ratio` has no other evidence than what these programs state.
    """
    short = _short(recent, snapshot)
    ratios = {device.uuid: ratio(device.used_bytes, device.size_bytes) for device in snapshot.devices}
    return {
        uuid: frozenset(recent.agents[process].uid for process in short[uuid] if process in recent.agents)
        for uuid, used in ratios.items()
        if used is None or used < NEARLY_FULL
    }


def _wasted(row: _Device) -> int | None:
    if row.cached is None or row.used_ratio is None or row.used_ratio >= NEARLY_FULL:
        return row.cached
    caches = _caches(row.lines) if row.short else {}
    return max((row.cached - caches.get(process, 0) for process in row.short), default=0)


def _idle_used(row: _Device) -> float | None:
    busy = row.device.sensors.gpu_utilization_ratio
    return None if busy is None else row.used_ratio if busy == 0 else 0.0


def _device_texts(row: _Device) -> Texts:
    device = row.device
    return {
        **named(device),
        "used": size(device.used_bytes),
        "free": size(device.free_bytes),
        "reclaimable": size(row.cached),
        "stranded": size(row.stranded),
        "unclaimed": size(row.unclaimed),
        "top_process": lambda: _top_process(row),
        "top_cache": lambda: _top_cache(row),
        "xids": ", ".join(f"{xid} ({counted(count, 'time')})" for xid, count in sorted(row.xids.items()) if count),
        **sensors.texts(device.sensors),
        **texts(row.verdicts),
    }


def _top_process(row: _Device) -> str:
    top = max(row.device.processes or (), key=lambda process: process.used_bytes or 0, default=None)
    return _program(row, top.key, top.used_bytes) if top else "no visible process"


def _top_cache(row: _Device) -> str:
    cache = max((line for line in row.lines if line.share == "cached"), key=lambda line: line.used_bytes, default=None)
    if cache is None or cache.process is None:
        return "no program with an agent"
    return _program(row, cache.process, cache.used_bytes)


def _program(row: _Device, process: ProcessKey, used_bytes: int | None) -> str:
    """Return name, pid and size of a program."""
    usage = row.device.processes_by_key.get(process)
    own = (line.workload for line in row.lines if (line.pid, line.start_ticks) == process)
    name = next(own, "") or (usage and usage.comm) or "unknown program"
    return f"{name} (pid {process.pid}, {size(used_bytes)})"


DEVICE = ScopeSpec(
    rows=devices,
    values=(
        RuleAttribute(
            "up",
            "boolean",
            "1 while the device answers its driver, else 0",
            lambda row: None if row.released else float(row.device.up),
        ),
        RuleAttribute(
            "used_bytes",
            "bytes",
            "memory in use, without the driver's own reservation",
            lambda row: row.device.used_bytes,
        ),
        RuleAttribute("free_bytes", "bytes", "memory free according to the driver", lambda row: row.device.free_bytes),
        RuleAttribute("used_ratio", "ratio", "used bytes over size", lambda row: row.used_ratio),
        RuleAttribute(
            "reclaimable_bytes",
            "bytes",
            "bytes that a flush of all programs on it would release",
            lambda row: row.cached,
        ),
        RuleAttribute(
            "reclaimable_ratio",
            "ratio",
            "reclaimable bytes over size",
            lambda row: ratio(row.cached, row.device.size_bytes),
        ),
        RuleAttribute(
            "wasted_ratio",
            "ratio",
            "reclaimable bytes over size while the device is at least 80 % full; if a program on it had an "
            f"out-of-memory error or a retry {IN_WINDOW}, reclaimable bytes of the other programs over size; else 0",
            lambda row: ratio(_wasted(row), row.device.size_bytes),
        ),
        RuleAttribute(
            "stranded_bytes", "bytes", "held and free in pools, but not released by a flush", lambda row: row.stranded
        ),
        RuleAttribute(
            "unclaimed_bytes",
            "bytes",
            "used memory without a visible owner; unknown where the driver lists no processes",
            lambda row: row.unclaimed,
        ),
        RuleAttribute(
            "unclaimed_ratio",
            "ratio",
            "unclaimed bytes over size",
            lambda row: ratio(row.unclaimed, row.device.size_bytes),
        ),
        RuleAttribute(
            "idle_used_ratio", "ratio", "used bytes over size while no kernel runs, 0 while one runs", _idle_used
        ),
        RuleAttribute(
            "xid_errors_increase",
            "count",
            f"XID errors that the driver reported {IN_WINDOW}; {FROM_A_FULL_WINDOW}",
            lambda row: float(sum(row.xids.values())) or (0.0 if row.watched else None),
        ),
        RuleAttribute("size_bytes", "bytes", "memory of the device", lambda row: row.device.size_bytes),
        RuleAttribute(
            "reserved_bytes",
            "bytes",
            "memory that the driver reserves for itself",
            lambda row: row.device.reserved_bytes,
        ),
        RuleAttribute(
            "processes",
            "count",
            "processes that the driver lists; unknown where it lists none at all",
            lambda row: None if row.device.processes is None else float(len(row.device.processes)),
        ),
        RuleAttribute(
            "idle_seconds", "seconds", "time without work, as far as observed", lambda row: row.device.idle_seconds
        ),
        RuleAttribute(
            "missed_readings",
            "count",
            "consecutive readings without new values of the device",
            lambda row: float(row.device.missed),
        ),
        *sensors.VALUES,
        *VERDICTS,
    ),
    labels={**DEVICE_LABELS, "workload": "workload of a program on the device"},
    labels_of=lambda row: (("gpu", str(row.device.index)), ("uuid", row.device.uuid)),
    placeholders={
        **NAMED,
        "used": "memory in use",
        "free": "memory free",
        "reclaimable": "bytes that a flush would release",
        "stranded": "held and free, but not released by a flush",
        "unclaimed": "used memory without a visible owner",
        "top_process": "the largest process: name, pid, size",
        "top_cache": "the program with the largest cache: name, pid, size",
        "xids": "XID errors of the window, by number",
        **sensors.PLACEHOLDERS,
        **VERDICT_TEXTS,
    },
    texts=_device_texts,
    programs=lambda row: _programs(row.lines),
)
