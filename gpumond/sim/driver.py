"""The driver of simulated devices for the helper of `gpumond suspend`: the states of cuCheckpointProcess*.

The copy takes no time, and its bytes exist only as numbers. A program that uses several devices is suspended on all of
them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from gpumond.host.machine import start_ticks
from gpumond.sim.device import OutOfMemory, SimDevice, simulated_devices

RUNNING, LOCKED, CHECKPOINTED = range(3)
"""Numbers of CUprocessState."""
FULL_SECONDS = 0.1
"""Time between two looks of a restore whether its memory is free."""


class SimDriver:
    """``devices``: those below ``root`` that the process uses, and whose programs can be suspended."""

    def __init__(self, root: str | os.PathLike[str], pid: int) -> None:
        """Raises Damaged."""
        found = (each for each in simulated_devices(root) if each.is_marked("processes", pid))
        self.devices: list[SimDevice] = [each for each in found if each.spec().can_suspend]

    def init(self) -> str:
        return ""

    def state(self, pid: int) -> tuple[int, str]:
        if any(each.is_marked("suspended", pid) for each in self.devices):
            return CHECKPOINTED, ""
        return (LOCKED if any(each.is_marked("locked", pid) for each in self.devices) else RUNNING), ""

    def lock(self, pid: int, milliseconds: int) -> str:
        for each in self.devices:
            each.lock(pid)
        return ""

    def checkpoint(self, pid: int) -> str:
        for each in self.devices:
            each.suspend(pid)
        return ""

    def restore(self, pid: int) -> str:
        """Wait until all memory is free, or the process has ended. CUDA's restore never returns then."""
        while start_ticks(pid) is not None and self.state(pid)[0] == CHECKPOINTED:
            for each in self.devices:
                if each.is_marked("suspended", pid):
                    with suppress(OutOfMemory):
                        each.resume(pid)
            if self.state(pid)[0] == CHECKPOINTED:
                time.sleep(FULL_SECONDS)
        return ""

    def unlock(self, pid: int) -> str:
        for each in self.devices:
            each.unlock(pid)
        return ""

    def moved_bytes(self, pid: int) -> int | None:
        return sum(each.held_bytes(pid) for each in self.devices if each.is_marked("suspended", pid))
