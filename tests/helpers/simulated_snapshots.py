"""Snapshots that a daemon would take of a plan, in virtual time on simulated allocators.

Nothing sleeps and nothing is written. The allocators are those of gpumond.sim, so segments, caches, stranded bytes and
out-of-memory errors occur as they do there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Sensors, Snapshot, SourceState
from gpumond.features.loadgen.plan import LoadPlan
from gpumond.features.loadgen.scenario_builder import Observation, ProgramEnding
from gpumond.sim.device import OutOfMemory
from tests.helpers.simulated_program import UID, DeviceMemory, Process

EPOCH = 1_750_000_000.0
"""Unix time of a plan's start in virtual time."""

QUANTUM_BYTES = 2 << 20
"""Unit of the driver's values."""

BOOTED_SECONDS = 10_000.0
"""Monotonic time of it."""

SOURCE = SourceState(name="sim", up=True, responsive=True)
_SENSORS = [Sensors(gpu_utilization_ratio=percent / 100) for percent in range(101)]


def snapshots(plan: LoadPlan, every: float = 1.0) -> Iterator[Snapshot]:
    """Yield a snapshot every ``every`` seconds, except those that the plan's observation omits."""
    machine = _Machine(plan)
    rng = Random(f"{plan.scenario}/{plan.seed}/samples")
    gaps = plan.observation.sample_gaps
    gap_at = rng.uniform(20.0, 50.0)
    at, seq = 0.0, 0
    while at <= plan.duration_seconds:
        machine.run(at)
        seq += 1
        yield machine.snapshot(seq, at)
        at += every
        if gaps and at >= gap_at:
            at += rng.uniform(4.0, 7.0)
            gap_at = at + rng.uniform(20.0, 50.0)
        for start, seconds in plan.observation.outages:
            if start <= at < start + seconds:
                at = start + seconds


class _Machine:
    """Devices and processes of a plan up to a time."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._next = 0
        self._rng = Random(f"{plan.scenario}/{plan.seed}/readings")
        self._memories = [DeviceMemory(plan.size_bytes) for _ in range(1 + max(p.device for p in plan.programs))]
        self._uuids = [f"GPU-{device:08x}-0000-4000-8000-000000000000" for device in range(len(self._memories))]
        self._running: dict[int, Process] = {}
        self._left: list[tuple[Process, ProgramEnding]] = []
        """Killed, with their memory still there."""
        self._pids = count(4000)

    def run(self, until: float) -> None:
        steps = self._plan.steps
        while self._next < len(steps) and steps[self._next].at <= until:
            at, action, program, block, size_bytes, ratio, ending = steps[self._next]
            self._next += 1
            process = self._running.get(program)
            try:
                if action == "start":
                    self._start(program, at)
                elif process is None:
                    pass  # it has ended before its time
                elif action == "take":
                    process.allocate_block(block, size_bytes, outside=False)
                elif action == "take-outside":
                    process.allocate_block(block, size_bytes, outside=True)
                elif action == "give":
                    process.free_block(block)
                elif action == "busy":
                    process.busy = ratio
                elif action == "flush":
                    process.changed()
                    process.allocator.empty_cache()
                else:
                    self._end(program, ending)
            except OutOfMemory:
                self._end(program, "crash")

    def snapshot(self, seq: int, at: float) -> Snapshot:
        devices = tuple(self._device(index) for index in range(len(self._memories)))
        reports: tuple[AgentReport, ...] = ()
        if self._plan.observation.view == "agent":
            reports = tuple(process.report() for process in self._running.values() if process.planned.agent)
        return Snapshot(
            seq=seq,
            taken_at=EPOCH + at,
            elapsed_seconds=BOOTED_SECONDS + at,
            source=SOURCE,
            devices=devices,
            reports=reports,
        )

    def _start(self, program: int, at: float) -> None:
        planned = self._plan.programs[program]
        ticks = int(100 * (BOOTED_SECONDS + at))
        self._running[program] = Process(
            planned, self._memories[planned.device], self._uuids[planned.device], next(self._pids), ticks
        )

    def _end(self, program: int, ending: ProgramEnding) -> None:
        process = self._running.pop(program, None)
        if process is None:
            return
        if ending in ("exit", "crash"):
            process.end()
        else:
            self._left.append((process, ending))

    def _device(self, index: int) -> DeviceReading:
        memory, observation = self._memories[index], self._plan.observation
        here = [process for process in self._running.values() if process.planned.device == index]
        used = _with_noise(memory.used_bytes, memory.size_bytes, observation, self._rng)
        return DeviceReading(
            uuid=self._uuids[index],
            index=index,
            name="virtual",
            vendor="sim",
            size_bytes=memory.size_bytes,
            used_bytes=used,
            free_bytes=memory.size_bytes - used,
            reserved_bytes=0,
            processes=None if observation.view == "device" else (*map(self._usage, here), *self._orphans(index)),
            sensors=_SENSORS[min(100, round(100 * sum(process.busy for process in here)))],
        )

    def _usage(self, process: Process) -> ProcessUsage:
        used = _with_noise(process.used_bytes, self._plan.size_bytes, self._plan.observation, self._rng)
        return ProcessUsage(
            pid=process.pid,
            start_ticks=process.start_ticks,
            used_bytes=used,
            kinds=("compute",),
            comm=process.planned.name,
            uid=UID,
            state="alive",
        )

    def _orphans(self, index: int) -> Iterator[ProcessUsage]:
        for process, ending in self._left:
            if process.planned.device == index and ending == "orphan-gone":
                yield ProcessUsage(
                    pid=process.pid, start_ticks=None, used_bytes=process.used_bytes, kinds=("compute",), state="gone"
                )
            elif process.planned.device == index and ending == "orphan-holder":
                pid, ticks = process.pid + 1000, process.start_ticks + 500  # a worker that has survived its parent
                yield ProcessUsage(
                    pid=pid,
                    start_ticks=ticks,
                    used_bytes=None,
                    kinds=("holder",),
                    comm=process.planned.name,
                    uid=UID,
                    state="alive",
                )


def _with_noise(used_bytes: int, size_bytes: int, observation: Observation, rng: Random) -> int:
    """Return the driver's value: with noise, and rounded to whole quanta."""
    noisy = used_bytes + (rng.gauss(0.0, observation.noise_bytes) if observation.noise_bytes else 0.0)
    return min(size_bytes, max(0, round(noisy / QUANTUM_BYTES) * QUANTUM_BYTES))
