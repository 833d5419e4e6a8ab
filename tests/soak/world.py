"""A machine with two simulated devices in virtual time: programs come and go, and everything can be taken away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from random import Random

from gpumond.loadgen.script import ProgramScript
from gpumond.model.sensors import Sensors
from gpumond.model.snapshot import AgentReport, DeviceReading, Fault, ProcessUsage, Reading, SourceState, XidErrors
from gpumond.model.units import GIB, MIB
from gpumond.sim.card import OutOfMemory
from tests.simulator.program import Process, Room

TICK_SECONDS = 10.0
EPOCH = 1_750_000_000.0
SIZE_BYTES = 80 * GIB
UUIDS = ("GPU-0", "GPU-1")
UP = SourceState("sim", up=True, responsive=True)
UID = 1000
BUSY = Sensors(gpu_utilization_ratio=0.7)
LIFE_TURNS = 12
"""The longest life of the first program that begins on a device at a turn."""
FURTHER_LIFE_TURNS = 2
"""And of those beside it, which take little, so that however many of them do not fill the device."""


class World:
    """``state``, ``lost``, ``disk_full``, ``clock_error`` and ``receiver_down`` are what incidents set.

    ``churn``: programs that begin on each device at a turn. ``identities``: pid and start of each program.
    """

    def __init__(self, seed: int = 1, churn: int = 1, identities: Iterator[tuple[int, int]] | None = None) -> None:
        self.dice = Random(seed)
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
        self._rooms = {uuid: Room(SIZE_BYTES) for uuid in UUIDS}
        self._running: dict[int, Process] = {}
        self._until: dict[int, float] = {}
        self._blocks = count(1)
        self.residents = {uuid: self.start(name, uuid) for name, uuid in zip(("train", "serve"), UUIDS, strict=True)}
        for process in self.residents.values():
            self.take(process, 10 * GIB)
        self._breath: dict[str, int] = {}

    @property
    def wall(self) -> float:
        return EPOCH + self.elapsed + self.clock_error

    def turn(self) -> None:
        """Ten seconds pass: on each device short programs begin, and the resident breathes."""
        self.elapsed += TICK_SECONDS
        for pid in [pid for pid, until in self._until.items() if until <= self.elapsed]:
            del self._until[pid]
            self.end(self._running[pid])
        for uuid, resident in self.residents.items():
            for number in range(self.churn):
                process = self.start(f"job-{self.programs % 20}", uuid, agent=self.dice.random() < 0.5)
                self.take(process, self.dice.randint(*((8, 64) if number else (64, 512))) * MIB)
                turns = self.dice.randint(1, FURTHER_LIFE_TURNS if number else LIFE_TURNS)
                self._until[process.pid] = self.elapsed + TICK_SECONDS * turns
            if uuid in self._breath:
                resident.give(self._breath.pop(uuid))
            else:
                self._breath[uuid] = self.take(resident, 2 * GIB)

    def start(self, name: str, uuid: str, agent: bool = True) -> Process:
        self.programs += 1
        pid, start_ticks = next(self._identities)
        process = Process(ProgramScript(name, UUIDS.index(uuid), agent), self._rooms[uuid], uuid, pid, start_ticks)
        self._running[pid] = process
        return process

    def take(self, process: Process, size_bytes: int) -> int:
        """The block; 0 if there was no room, which the program's allocator has counted."""
        block = next(self._blocks)
        try:
            process.take(block, size_bytes, outside=False)
        except OutOfMemory:
            return 0
        return block

    def end(self, process: Process) -> None:
        del self._running[process.pid]
        process.end()

    def orphan(self, process: Process) -> None:
        """It is gone, and its memory is still there, until it is ended."""
        del self._running[process.pid]

    def give_back(self, orphan: Process) -> None:
        orphan.end()

    def used_bytes(self, uuid: str) -> int:
        return self._rooms[uuid].used_bytes

    def reading(self) -> Reading | None:
        """Return the driver's reading; None if it does not respond."""
        if not self.state.up:
            return None
        devices = tuple(self._device(uuid) for uuid in UUIDS if uuid not in self.lost)
        faults = tuple(Fault("sim", "gpu_is_lost", uuid, "for a test") for uuid in sorted(self.lost))
        xids = tuple(XidErrors(uuid, 79, number, self.wall) for uuid, number in self.xids.items())
        return Reading(devices, faults, "1", xids=xids)

    def reports(self) -> tuple[AgentReport, ...]:
        speaking = (each for each in self._running.values() if each.planned.agent and each.pid not in self.silent)
        return tuple(process.report() for process in speaking)

    def _device(self, uuid: str) -> DeviceReading:
        used = self._rooms[uuid].used_bytes
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
                    process.pid, process.start_ticks, process.used_bytes, kinds, name, UID, state="alive"
                )
