"""A machine with two simulated devices in virtual time: programs start and end, and every part of it can fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from random import Random

from gpumond.facts.snapshot import (
    AgentReport,
    DeviceReading,
    Fault,
    ProcessUsage,
    Reading,
    Sensors,
    SourceState,
    XidErrors,
)
from gpumond.facts.units import GIB, MIB
from gpumond.features.loadgen.scenario_builder import PlannedProgram
from gpumond.sim.device import OutOfMemory
from tests.helpers.simulated_program import DeviceMemory, Process

TICK_SECONDS = 10.0
EPOCH = 1_750_000_000.0
SIZE_BYTES = 80 * GIB
UUIDS = ("GPU-0", "GPU-1")
UP = SourceState(name="sim", up=True, responsive=True)
UID = 1000
BUSY = Sensors(gpu_utilization_ratio=0.7)
MAX_TICKS = 12
"""Maximum duration, in ticks, of the first program that starts on a device in a tick."""
FURTHER_MAX_TICKS = 2
"""Maximum of the other programs, which take little memory, so no number of them fills the device."""


class World:
    """``state``, ``lost``, ``disk_full``, ``clock_error`` and ``receiver_down`` are set by incidents.

    ``churn``: programs that start on each device in a tick. ``identities``: pid and start of each program.
    """

    def __init__(self, seed: int = 1, churn: int = 1, identities: Iterator[tuple[int, int]] | None = None) -> None:
        self.rng = Random(seed)
        self.churn = churn
        self.elapsed = 0.0
        self.state = UP
        self.lost: set[str] = set()
        self.silent: set[int] = set()
        self.xids: dict[str, int] = defaultdict(int)
        self.disk_full = self.receiver_down = False
        self.clock_error = 0.0
        self.programs = 0
        self._identities = identities or ((pid, 100 + pid) for pid in count(4000))
        self._memories = {uuid: DeviceMemory(SIZE_BYTES) for uuid in UUIDS}
        self._running: dict[int, Process] = {}
        self._until: dict[int, float] = {}
        self._blocks = count(1)
        self.residents = {uuid: self.start(name, uuid) for name, uuid in zip(("train", "serve"), UUIDS, strict=True)}
        for process in self.residents.values():
            self.allocate(process, 10 * GIB)
        self._resident_blocks: dict[str, int] = {}

    @property
    def wall(self) -> float:
        return EPOCH + self.elapsed + self.clock_error

    def advance(self) -> None:
        """Advance by ten seconds: short programs start on each device, and the resident program allocates or frees a
        block.
        """
        self.elapsed += TICK_SECONDS
        for pid in [pid for pid, until in self._until.items() if until <= self.elapsed]:
            del self._until[pid]
            self.end(self._running[pid])
        for uuid, resident in self.residents.items():
            for number in range(self.churn):
                process = self.start(f"job-{self.programs % 20}", uuid, agent=self.rng.random() < 0.5)
                self.allocate(process, self.rng.randint(*((8, 64) if number else (64, 512))) * MIB)
                ticks = self.rng.randint(1, FURTHER_MAX_TICKS if number else MAX_TICKS)
                self._until[process.pid] = self.elapsed + TICK_SECONDS * ticks
            if uuid in self._resident_blocks:
                resident.free_block(self._resident_blocks.pop(uuid))
            else:
                self._resident_blocks[uuid] = self.allocate(resident, 2 * GIB)

    def start(self, name: str, uuid: str, agent: bool = True) -> Process:
        self.programs += 1
        pid, start_ticks = next(self._identities)
        process = Process(PlannedProgram(name, UUIDS.index(uuid), agent), self._memories[uuid], uuid, pid, start_ticks)
        self._running[pid] = process
        return process

    def allocate(self, process: Process, size_bytes: int) -> int:
        """Return the allocated block, or 0 if the device was full, which the program's allocator has counted."""
        block = next(self._blocks)
        try:
            process.allocate_block(block, size_bytes, outside=False)
        except OutOfMemory:
            return 0
        return block

    def end(self, process: Process) -> None:
        del self._running[process.pid]
        process.end()

    def orphan(self, process: Process) -> None:
        """The process has ended, and its memory remains until it is ended."""
        del self._running[process.pid]

    def give_back(self, orphan: Process) -> None:
        orphan.end()

    def used_bytes(self, uuid: str) -> int:
        return self._memories[uuid].used_bytes

    def reading(self) -> Reading | None:
        """Return the driver's reading; None if it does not respond."""
        if not self.state.up:
            return None
        devices = tuple(self._device(uuid) for uuid in UUIDS if uuid not in self.lost)
        faults = tuple(Fault("sim", "gpu_is_lost", uuid, "for a test") for uuid in sorted(self.lost))
        xids = tuple(XidErrors(uuid, 79, number, self.wall) for uuid, number in self.xids.items())
        return Reading(devices=devices, faults=faults, driver_version="1", xids=xids)

    def reports(self) -> tuple[AgentReport, ...]:
        speaking = (each for each in self._running.values() if each.planned.agent and each.pid not in self.silent)
        return tuple(process.report() for process in speaking)

    def _device(self, uuid: str) -> DeviceReading:
        used = self._memories[uuid].used_bytes
        return DeviceReading(
            uuid=uuid,
            index=UUIDS.index(uuid),
            name="virtual",
            vendor="sim",
            size_bytes=SIZE_BYTES,
            used_bytes=used,
            free_bytes=SIZE_BYTES - used,
            reserved_bytes=0,
            processes=tuple(self._processes(uuid)),
            sensors=BUSY,
        )

    def _processes(self, uuid: str) -> Iterator[ProcessUsage]:
        for process in self._running.values():
            if process.uuid == uuid:
                kinds, name = ("compute",), process.planned.name
                yield ProcessUsage(
                    pid=process.pid,
                    start_ticks=process.start_ticks,
                    used_bytes=process.used_bytes,
                    kinds=kinds,
                    comm=name,
                    uid=UID,
                    state="alive",
                )
