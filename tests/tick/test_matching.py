"""The driver's count and an agent's older report: a simulated program is flushed, and takes its memory back before its
next report. Its overhead, the context, stays what it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import Reading, SourceState
from gpumond.facts.units import MIB
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import DeviceSpec, create
from gpumond.tick.ledger import make_ledger
from gpumond.tick.observe import observe
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

SIM = SourceState(name="sim", up=True, responsive=True)
UUID = "GPU-a"
CONTEXT = 256 * MIB
STEP = 0.05
"""Seconds between two looks at what is due."""


def program(allocator: CachingAllocator, random: Random) -> Iterator[None]:
    """Train with batches of different sizes, as the demo's programs do."""
    batches: list[int] = []
    while True:
        if batches and random.random() < 0.5:
            allocator.free(batches.pop())
        elif len(batches) < 6:
            batches.append(allocator.malloc(random.randrange(40, 400) * MIB))
        yield


def frames(directory: Path, seed: int, interval: float, seconds: float = 40.0) -> Iterator[tuple[float, Frame]]:
    """Yield time and frame of each tick, with a flush at 20 s and 30 s, after each of which a tick follows at once."""
    random = Random(seed)
    device = create(directory, DeviceSpec(uuid=UUID, index=0, name="sim", size_bytes=24 << 30, context_bytes=CONTEXT))
    allocator = CachingAllocator(device)
    steps = program(allocator, random)
    allocator.free(allocator.malloc(2 * MIB))
    phase, due, start_ticks = random.uniform(0.2, 0.8), 0.0, device.read().processes[0].start_ticks  # type: ignore[index]
    reported_at, usage, frame = -1.0, allocator.usage(), None
    flushes = [20.0, 30.0]
    for number in range(int(seconds / STEP)):
        now = number * STEP
        if now >= 3 and number % 3 == 0:
            next(steps)
        if now - reported_at >= 1.0 and now >= phase:
            reported_at, usage = now, allocator.usage()
        if flushes and now >= flushes[0]:
            del flushes[0]
            allocator.empty_cache()
            reported_at, usage, due = now, allocator.usage(), now
            if random.random() < 0.5:
                next(steps)  # before the tick that follows
        if now < due:
            continue
        due = now + interval
        reading = Reading(devices=(device.read(),))
        age = now - reported_at if reported_at >= 0 else 0.0
        report = make_report(os.getpid(), (usage,), start_ticks=start_ticks, age_seconds=age)
        previous = frame.snapshot if frame else None
        snapshot = observe(previous, SIM, reading, (report,), taken_at=1e9 + now, elapsed_seconds=now)
        frame = Frame(snapshot, make_ledger(snapshot, frame))
        yield now, frame
    allocator.close()


@pytest.mark.parametrize("interval", [0.2, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_overhead_after_a_flush_is_that_before(tmp_path: Path, seed: int, interval: float):
    unreported, diagnosis = 0, Diagnosis()
    for now, frame in frames(tmp_path / "card0", seed, interval):
        lines = {line.share: line.used_bytes for line in frame.ledger.lines}
        (device,), (overcount,) = frame.snapshot.devices, frame.ledger.overcounts
        assert sum(lines.values()) == (device.used_bytes or 0) + overcount.overcount_bytes
        assert lines["overhead"] <= CONTEXT, now
        unreported += lines.get("opaque", 0)
        diagnosis = diagnose(diagnosis, frame.snapshot)
    assert unreported  # the simulated program has taken memory between two reports
    for process in (None, frame.snapshot.reports[0].key):
        points = diagnosis.history.shares((UUID, process), since=1e9 + 3)
        assert len(points) > 30
        assert {point.overhead for point in points if (point.overhead or 0) > CONTEXT} == set()
        assert all(
            sum(point[4:10][i] or 0 for i in range(6)) == pytest.approx(point.used) or point.overhead == 0
            for point in points
        )


def test_overhead_grows_when_a_later_report_confirms_it():
    frame = None
    found = []
    for second, (used, age) in enumerate(
        [(3000, 0.5), (5000, 1.5), (5000, 0.5), (5000, 1.5), (6000, 0.5), (6000, 0.5)]
    ):
        device = make_device(used_bytes=used * MIB, processes=(make_process(used_bytes=used * MIB),))
        report = make_report(pools=(make_pool(live=2000 * MIB),), age_seconds=age)
        snapshot = make_snapshot(device, reports=(report,), elapsed_seconds=float(second))
        frame = Frame(snapshot, make_ledger(snapshot, frame))
        lines = {line.share: line.used_bytes // MIB for line in frame.ledger.lines}
        found.append((lines["overhead"], lines.get("opaque", 0)))
    assert found == [(1000, 0), (1000, 2000), (3000, 0), (3000, 0), (3000, 1000), (4000, 0)]
