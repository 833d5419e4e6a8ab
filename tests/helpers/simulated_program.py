"""A program and its memory in virtual time: a simulated allocator on a device that is only a number."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from gpumond.facts.snapshot import AgentReport
from gpumond.features.loadgen.scenario_builder import CONTEXT_BYTES, PlannedProgram
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import Context, DeviceSpec, OutOfMemory, SimDevice

REPORT_AGE_SECONDS = 0.5
UID = 1000
_numbers = count()


class DeviceMemory:
    """Used bytes of a device."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.used_bytes = size_bytes, 0

    def claim(self, size_bytes: int) -> None:
        if self.used_bytes + size_bytes > self.size_bytes:
            raise OutOfMemory(f"{size_bytes} bytes on a device that has {self.size_bytes - self.used_bytes} left")
        self.used_bytes += size_bytes


class _Device(SimDevice):
    """Simulated device without a directory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._spec = DeviceSpec(f"virtual-{next(_numbers)}", 0, "", memory.size_bytes, context_bytes=CONTEXT_BYTES)

    def spec(self) -> DeviceSpec:
        return self._spec

    def attach(self) -> Context:
        return _Context(self.memory)


class _Context(Context):
    def __init__(self, memory: DeviceMemory) -> None:
        memory.claim(CONTEXT_BYTES)
        self._memory, self.used_bytes = memory, CONTEXT_BYTES

    def allocate(self, size_bytes: int) -> None:
        self._memory.claim(size_bytes)
        self.used_bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        self._memory.used_bytes -= size_bytes
        self.used_bytes -= size_bytes

    def close(self) -> None:
        self.free(self.used_bytes)


class Process:
    """One process of a program of the plan."""

    def __init__(self, planned: PlannedProgram, memory: DeviceMemory, uuid: str, pid: int, start_ticks: int) -> None:
        self.planned, self.uuid, self.pid, self.start_ticks = planned, uuid, pid, start_ticks
        self.busy = 0.0
        self._memory = memory
        self.allocator = CachingAllocator(_Device(memory))
        self.allocator.free(self.allocator.malloc(1))  # a program has its context from the start
        self._blocks: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        self._outside_bytes = 0
        self._report: AgentReport | None = None
        self._used_bytes: int | None = None

    def allocate_block(self, block: int, size_bytes: int, outside: bool) -> None:
        self.changed()
        if not outside:
            self._blocks[block] = self.allocator.malloc(size_bytes)
            return
        self._memory.claim(size_bytes)
        self._outside[block] = size_bytes
        self._outside_bytes += size_bytes

    def free_block(self, block: int) -> None:
        self.changed()
        address = self._blocks.pop(block, None)
        if address is not None:
            self.allocator.free(address)
        else:
            size_bytes = self._outside.pop(block)
            self._outside_bytes -= size_bytes
            self._memory.used_bytes -= size_bytes

    def changed(self) -> None:
        self._report = self._used_bytes = None

    def end(self) -> None:
        self.allocator.close()
        self._memory.used_bytes -= self._outside_bytes

    @property
    def used_bytes(self) -> int:
        if self._used_bytes is None:
            self._used_bytes = CONTEXT_BYTES + self.allocator.usage().held_bytes + self._outside_bytes
        return self._used_bytes

    def report(self) -> AgentReport:
        if self._report is None:
            self._report = AgentReport(
                pid=self.pid,
                start_ticks=self.start_ticks,
                uid=UID,
                workload=self.planned.name,
                age_seconds=REPORT_AGE_SECONDS,
                frameworks=("sim",),
                flush_policy="allow",
                pools=(replace(self.allocator.usage(), device_uuid=self.uuid),),
            )
        return self._report
