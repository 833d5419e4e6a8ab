"""Locks of flushes: processes that are not flushed at the same time.

A flush stalls its device and its program. Of one user's processes, those that share a device, a workload or a job are
flushed one after the other: ranks wait for each other on their devices, and may hang if two stall at the same instant.
Processes of different users on one device are kept apart for a few seconds at most, so that a program that does not
answer delays no flush of another user's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from gpumond.host.peer_credentials import Identity
from gpumond.model.snapshot import AgentReport

NEIGHBOUR_SECONDS = 5.0


class Locks:
    """``neighbour_seconds``: the longest total wait of a flush for those of other users on its devices."""

    def __init__(self, neighbour_seconds: float = NEIGHBOUR_SECONDS) -> None:
        self._neighbour_seconds = neighbour_seconds
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._silent: dict[str, Identity] = {}
        """By group: the process that did not answer its last flush in time."""

    @asynccontextmanager
    async def held(self, report: AgentReport) -> AsyncIterator[None]:
        """Hold the locks of this process: none of its user's processes on its devices or in its groups is
        flushed meanwhile.

        The locks of its user come first, so that at most one process of each user waits for a device.
        """
        devices = sorted({pool.device_uuid for pool in report.pools})
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._neighbour_seconds
        async with AsyncExitStack() as stack:
            for name in sorted({*_groups(report), *(f"device {uuid} of uid {report.uid}" for uuid in devices)}):
                await stack.enter_async_context(self._lock(name))
            for uuid in devices:
                lock = self._lock(f"device {uuid}")
                try:
                    await asyncio.wait_for(lock.acquire(), max(0.001, deadline - loop.time()))
                except asyncio.TimeoutError:
                    continue
                stack.callback(lock.release)
            yield

    def unanswered(self, report: AgentReport) -> None:
        """Record that its locks are free again, while its flush may still run."""
        self._silent |= dict.fromkeys(_groups(report), identity_of(report))

    def unanswering(self, report: AgentReport, flushing: Callable[[Identity], bool]) -> Identity | None:
        """Return a process of its groups that has not answered its last flush and may still execute it."""
        self._silent = {name: who for name, who in self._silent.items() if flushing(who)}
        others = (self._silent.get(name) for name in _groups(report))
        return next((who for who in others if who not in (None, identity_of(report))), None)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def identity_of(report: AgentReport) -> Identity:
    return Identity(report.pid, report.start_ticks, report.uid)


def _groups(report: AgentReport) -> list[str]:
    """Return the exclusion groups of this process. Unnamed workloads of one user share a group."""
    ranks = [f"ranks of uid {report.uid}"] if report.program.distributed else []
    return [f"workload {report.workload!r} of uid {report.uid}", *ranks]
