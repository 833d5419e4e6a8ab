"""Case files from evidence, and the memory of all programs of a device before an error. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from gpumond.facts.frame import Frame
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import DeviceReading, ProcessUsage
from gpumond.facts.units import human
from gpumond.features.oom.case import CaseFile, Curve, Remedy, Timeline
from gpumond.features.oom.evidence import Evidence
from gpumond.features.oom.remedies import remedies, sentence
from gpumond.tick.history import History

SECONDS, POINTS = 600.0, 120
"""Length of a timeline, and its number of points."""
CURVES = 12
"""Programs with a curve of their own; the others are summed."""
MOST = 64
"""Programs of a timeline, those that hold most: a tick reads the history of each."""
FULL = 0.02
"""Free part of a device below which it is full."""
AT_ITS_PEAK = 0.98
"""Part of its highest use that a program without an agent held when it ended."""


def case_id(at: float, pid: int, number: int) -> str:
    return f"{int(at)}-{pid}-{number}"


def case_file(e: Evidence, history: History) -> CaseFile:
    """Return the case file of an error of a program with an agent."""
    found = remedies(e)
    report, oom = e.report, e.oom
    return CaseFile(
        id=case_id(oom.at, report.pid, oom.number),
        at=oom.at,
        pid=report.pid,
        start_ticks=report.start_ticks,
        workload=report.workload,
        device_uuid=e.uuid,
        gpu="" if e.device is None else str(e.device.index),
        summary=sentence(e, found),
        request_bytes=oom.request_bytes,
        free_bytes=e.free,
        missing_bytes=e.missing,
        remedies=found,
        uid=report.uid,
        job=report.job,
        rank=report.rank,
        oom=oom,
        lines=tuple(e.lines),
        timeline=Timeline() if e.uuid is None else timeline(history, e.before, e.uuid, oom.at),
    )


def opaque_case(process: ProcessUsage, device: DeviceReading, before: Frame, history: History) -> CaseFile | None:
    """Return the case file of a program without an agent that ended while its device was full; None if it was not.

    The driver does not state why a program ends: the summary says so.
    """
    free, size, used = device.current_free_bytes, device.size_bytes, process.used_bytes
    at = before.snapshot.taken_at
    curve = timeline(history, before, device.uuid, at)
    own = next((each for each in curve.curves if each.pid == process.pid), None)
    highest = max((value for value in own.used_bytes if value is not None), default=0) if own else 0
    if free is None or not size or not used or free >= FULL * size or used < AT_ITS_PEAK * highest:
        return None
    name = f"{process.comm or 'a program'} (pid {process.pid})"
    summary = (
        f"{name} ended with {human(used)} on GPU {device.index}, of which only {human(free)} was free: it may have run "
        "out of memory. Start it with gpumond run: next time you'll see the request, the line and the remedies"
    )
    return CaseFile(
        id=case_id(at, process.pid, 0),
        at=at,
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=process.comm or "",
        device_uuid=device.uuid,
        gpu=str(device.index),
        summary=summary,
        free_bytes=free,
        remedies=_caches(before, device, process.key),
        uid=process.uid,
        lines=tuple(line for line in before.ledger.lines if line.device_uuid == device.uuid),
        timeline=curve,
    )


def _caches(before: Frame, device: DeviceReading, own: ProcessKey) -> tuple[Remedy, ...]:
    snapshot = before.snapshot
    reports = [each for each in snapshot.reports_by_device.get(device.uuid, ()) if each.flush_policy != "never"]
    sizes = [(snapshot.reclaimable_from(each, device), each) for each in reports if each.key != own]
    return tuple(
        Remedy(
            name="neighbor-cache",
            text=f"flush {each.workload or 'a program'} (pid {each.pid}): gpumond flush --pid {each.pid}",
            size_bytes=size,
            enough=None,
            basis="reported",
            source="this program's agent",
        )
        for size, each in sorted(sizes, key=lambda pair: -pair[0])
        if size
    )


def timeline(history: History, frame: Frame, uuid: str, at: float) -> Timeline:
    """Return the use of each program on a device in the ten minutes before ``at``, the largest first."""
    since = at - SECONDS
    used: Counter[ProcessKey] = Counter()
    names: dict[ProcessKey, str] = {}
    for line in frame.ledger.lines:
        if line.device_uuid == uuid and line.process is not None:
            used[line.process] += line.used_bytes
            names[line.process] = line.workload
    keys = [key for key, _ in used.most_common(MOST)]
    series = {key: history.series((uuid, key), "used", since) for key in keys}
    begin = min((points[0].at for points in series.values() if points), default=at)
    step = max(1.0, (at - begin) / POINTS)
    times = [begin + step * number for number in range(int((at - begin) / step) + 1)]
    curves = []
    for key, points in series.items():
        known = [point for point in points if point.at <= at + 1.0]
        if known:
            moments = [point.at for point in known]
            values = [_value([point.median for point in known], bisect_right(moments, time + step)) for time in times]
            curves.append(Curve(pid=key.pid, workload=names[key], used_bytes=tuple(values)))
    curves.sort(key=lambda curve: -max((value or 0 for value in curve.used_bytes), default=0))
    shown, rest = curves[:CURVES], curves[CURVES:]
    if rest:
        shown.append(Curve(pid=None, workload="other programs", used_bytes=_sums(rest)))
    return Timeline(tuple(round(time, 1) for time in times), tuple(shown))


def _value(values: Sequence[float], place: int) -> int | None:
    return int(values[place - 1]) if place else None


def _sums(curves: Sequence[Curve]) -> tuple[int | None, ...]:
    rows = zip(*(curve.used_bytes for curve in curves), strict=True)
    return tuple(sum(known) if (known := [each for each in row if each is not None]) else None for row in rows)
