"""Short memory curves as snapshots, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Verdict
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Sensors, Snapshot
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

MIB = 1 << 20
MINUTE = 60.0
HOUR = 3600.0
SIZE = 80 * GIB

Curve = Callable[[float], float]
"""Function from seconds since the start to bytes."""


def steps_of(minutes: float, every: float = 1.0) -> Iterator[float]:
    return (number * every for number in range(int(minutes * MINUTE / every) + 1))


def noisy(curve: Curve, deviation: float, seed: int = 1) -> Curve:
    rng = Random(seed)
    return lambda at: curve(at) + rng.gauss(0.0, deviation)


def leaking(per_minute: float, onset: float = 0.0, base: float = 20 * GIB) -> Curve:
    """Grow by these bytes a minute from ``onset`` (minutes) on."""
    return lambda at: base + per_minute * max(0.0, at / MINUTE - onset)


def at_moment(at: float, *devices: DeviceReading, **fields: object) -> Snapshot:
    return make_snapshot(*devices, seq=int(at) + 1, elapsed_seconds=at, taken_at=1e9 + at, **fields)


def by_process(curve: Curve, times: Iterable[float], **fields: object) -> Iterator[Snapshot]:
    """Make snapshots of one process that only the driver lists."""
    for at in times:
        used = int(curve(at))
        yield at_moment(at, of_device(used, (make_process(10, used, comm="train"),), **fields))


def by_agent(live: Curve, held: Curve, times: Iterable[float], outside: Curve = lambda at: GIB) -> Iterator[Snapshot]:
    for at in times:
        own, whole = int(live(at)), int(held(at))
        used = whole + int(outside(at))
        report = make_report(10, (make_pool(live=own, cached=whole - own),))
        yield at_moment(at, of_device(used, (make_process(10, used),)), reports=(report,))


def by_device(curve: Curve, times: Iterable[float], **fields: object) -> Iterator[Snapshot]:
    """Make snapshots of a device whose driver lists no processes."""
    for at in times:
        yield at_moment(at, of_device(int(curve(at)), None, **fields))


def of_device(
    used: int, processes: tuple[ProcessUsage, ...] | None, busy: float | None = 0.5, **fields: object
) -> DeviceReading:
    sensors = Sensors(gpu_utilization_ratio=busy)
    return make_device(used_bytes=used, size_bytes=SIZE, processes=processes, sensors=sensors, **fields)


def each_onset(snapshots: Iterable[Snapshot], speedup: float = 1.0) -> Iterator[tuple[float, Verdict]]:
    """Yield every verdict at its beginning, with the elapsed seconds."""
    diagnosis, before = Diagnosis(speedup), frozenset[tuple[str, int | None, str]]()
    for snapshot in snapshots:
        diagnosis = diagnose(diagnosis, snapshot)
        active = {(verdict.device_uuid, verdict.pid, verdict.kind): verdict for verdict in diagnosis.verdicts}
        yield from ((snapshot.elapsed_seconds, active[key]) for key in active if key not in before)
        before = frozenset(active)


def onsets(snapshots: Iterable[Snapshot], speedup: float = 1.0) -> list[tuple[float, Verdict]]:
    return list(each_onset(snapshots, speedup))


def first(found: Iterable[tuple[float, Verdict]], kind: str) -> tuple[float, Verdict] | None:
    """Return the first onset of this kind. What follows is not computed if ``found`` is an iterator."""
    return next(((at, verdict) for at, verdict in found if verdict.kind == kind), None)


def last(snapshots: Iterable[Snapshot], speedup: float = 1.0) -> tuple[Verdict, ...]:
    """Return the verdicts that are active at the end."""
    diagnosis = Diagnosis(speedup)
    for snapshot in snapshots:
        diagnosis = diagnose(diagnosis, snapshot)
    return diagnosis.verdicts


def kinds(found: Iterable[tuple[float, Verdict]]) -> set[str]:
    return {verdict.kind for _, verdict in found}
