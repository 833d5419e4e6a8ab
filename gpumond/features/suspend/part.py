"""Suspension in the daemon: its settings, its helpers, and what it reads of a program's surroundings."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection

from gpumond.facts.program import ProcessKey
from gpumond.features.suspend.decision import Surroundings
from gpumond.features.suspend.helpers import Helpers
from gpumond.features.suspend.suspender import Suspender
from gpumond.host.machine import descends, find_process, is_pending
from gpumond.host.memory import available_bytes
from gpumond.host.peer import Identity
from gpumond.kernel import Grants, Kernel, Part, Suspends, Tick


class SuspendPart(Suspender, Part):
    table = "suspensions"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(
            allowed=lambda: kernel.settings.allow_suspend,
            idle_seconds=lambda: kernel.settings.suspend_idle,
            snapshot=lambda: kernel.frame.snapshot if kernel.frame else None,
            read_driver=kernel.read_driver,
            grants=kernel.get(Grants),
            helpers=Helpers(kernel.store_file.parent / "suspend"),
            surroundings=surroundings,
            is_alive=is_alive,
            is_continued=lambda each: is_pending(each.pid, signal.SIGCONT),
            flushing=lambda each: kernel.programs.flushing(Identity(each.pid, each.start_ticks, each.uid)),
            store=kernel.store,
            note=kernel.note,
            wake=kernel.dependencies.wake.set,
            clock=kernel.clock,
        )
        kernel.provide(Suspends, self)
        kernel.provide(Suspender, self)

    def act(self, tick: Tick) -> None:
        self.execute(tick.frame.snapshot)


def is_alive(process: ProcessKey) -> bool:
    found = find_process(process.pid)
    return found is not None and found[0] == process


async def surroundings(process: ProcessKey, listed: Collection[ProcessKey]) -> Surroundings:
    """Read what concerns a process among those that the driver lists."""
    return await asyncio.to_thread(_read, process, listed)


def _read(process: ProcessKey, listed: Collection[ProcessKey]) -> Surroundings:
    others = sorted(each.pid for each in listed if each.pid != process.pid)
    return Surroundings(
        host_bytes=available_bytes([process.pid]),
        children=tuple(pid for pid in others if descends(pid, {process.pid})),
        uid=os.geteuid(),
    )
