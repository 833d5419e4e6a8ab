"""Whose turn it is to be flushed.

A flush stalls its device and its program: processes that share a device take turns, and so do those of one workload
and the ranks of a job. Ranks wait for each other on their devices, and may hang if two stall at the same instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

from gpumond.identity import Identity
from gpumond.model import AgentReport


class Turns:
    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._silent: dict[str, Identity] = {}
        """By company: who had the turn last and did not answer in time."""

    @asynccontextmanager
    async def of(self, report: AgentReport) -> AsyncIterator[None]:
        """This process's own: no other of its devices or its companies has one meanwhile."""
        async with AsyncExitStack() as stack:
            for name in sorted({*_companies(report), *(pool.device_uuid for pool in report.pools)}):
                lock = self._locks.setdefault(name, asyncio.Lock())
                await stack.enter_async_context(lock)
            yield

    def unanswered(self, report: AgentReport) -> None:
        """Its turn ends, but not necessarily its flush."""
        self._silent |= dict.fromkeys(_companies(report), identity_of(report))

    def unanswering(self, report: AgentReport, flushing: Callable[[Identity], bool]) -> Identity | None:
        """Who of its companies may be in a flush still, having not answered the last one."""
        self._silent = {name: who for name, who in self._silent.items() if flushing(who)}
        others = (self._silent.get(name) for name in _companies(report))
        return next((who for who in others if who not in (None, identity_of(report))), None)


def identity_of(report: AgentReport) -> Identity:
    return Identity(report.pid, report.start_ticks, report.uid)


def _companies(report: AgentReport) -> list[str]:
    """What this process is one of. One without a name may belong to any other of its user that has none."""
    ranks = [f"ranks of uid {report.uid}"] if report.program.distributed else []
    return [f"workload {report.workload!r} of uid {report.uid}", *ranks]
