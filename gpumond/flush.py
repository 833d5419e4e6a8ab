"""A flush that proves itself: plan, run, verify, receipt.

The driver's count for the process is read, its agent flushes one allocator and tells what its pools
held before and after, and the driver is read again until its count has settled. A flush stalls its device and its
program: processes that share a device take turns, and so do those of one workload and the ranks of a job, which
wait for each other on their devices and may hang if two stall at the same instant.

This module does *not* cover: what an allocator can return (the agent's adapters), nor who may ask (``api``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpumond.errors import AlreadyUnderWay, CoolingDown, NoSuchTarget
from gpumond.identity import Identity
from gpumond.model import (
    DEFAULT_STEPS,
    STEPS,
    AgentReport,
    Outcome,
    Reading,
    Receipt,
)
from gpumond.receipts import DriverCounts, blank, moved, verify, with_thrash
from gpumond.turns import Turns, identity_of
from gpumond.wire import Flush, PoolChange, Result

SETTLE_SECONDS = 5.0
STABLE_SECONDS = 1.0
COOLDOWN_SECONDS = 30.0
RECEIPTS_KEPT = 1000


class Agents(Protocol):
    def reports(self) -> Sequence[AgentReport]: ...
    async def flush(self, identity: Identity, request: Flush) -> Result | None: ...
    def flushing(self, identity: Identity) -> bool: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a flush concerns: exactly one of the first four; with ``uid`` only programs of that user."""

    pid: int | None = None
    device: str | None = None
    workload: str | None = None
    all: bool = False
    uid: int | None = None

    def matches(self, report: AgentReport) -> bool:
        if self.uid is not None and report.uid != self.uid:
            return False
        if self.pid is not None:
            return report.pid == self.pid
        if self.device is not None:
            return any(pool.device_uuid == self.device for pool in report.pools)
        if self.workload is not None:
            return report.workload == self.workload
        return self.all

    def __str__(self) -> str:
        names = (("pid", self.pid), ("device", self.device), ("workload", self.workload))
        whose = "" if self.uid is None else f" of uid {self.uid}"
        return next((f"{name} {value}" for name, value in names if value is not None), "all") + whose


@dataclass(frozen=True, slots=True)
class FlushRequest:
    target: Target
    steps: tuple[str, ...] = DEFAULT_STEPS
    min_reclaimable_bytes: int = 0
    dry_run: bool = False
    timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    id: str
    receipts: tuple[Receipt, ...]
    released_bytes: int


def ordered_steps(steps: tuple[str, ...]) -> tuple[str, ...]:
    """The steps in the order in which they run, each once. Raises ValueError for one that there is not."""
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"unknown step {step!r:.40}; expected some of {', '.join(STEPS)}")
    if not steps:
        raise ValueError(f"expected at least one of {', '.join(STEPS)}")
    return tuple(step for step in STEPS if step in steps)


class Flusher:
    """Carries out flushes, one at a time for a process, and keeps their receipts."""

    def __init__(
        self,
        agents: Agents,
        read_driver: Callable[[], Awaitable[Reading | None]],
        *,
        done: Callable[[Receipt], None] = lambda receipt: None,
        cooldown_seconds: float = COOLDOWN_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.receipts: deque[Receipt] = deque(maxlen=RECEIPTS_KEPT)
        self._agents, self._read_driver, self._done, self._clock = agents, read_driver, done, clock
        self.cooldown_seconds, self._settle = cooldown_seconds, settle_seconds
        self._under_way: set[Identity] = set()
        self._flushed_at: dict[Identity, float] = {}
        self._turns = Turns()

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushAnswer:
        """Answers when all of it is over. Raises NoSuchTarget, AlreadyUnderWay or CoolingDown if nothing can start."""
        targets = [report for report in self._agents.reports() if request.target.matches(report)]
        if not targets:
            raise NoSuchTarget(f"no connected agent matches {request.target}; `gpumond status` lists the agents")
        free = self._admit(targets, request)
        identities = {identity_of(report) for report in free}
        self._under_way |= identities
        try:
            flushed = await asyncio.gather(*(self._process(report, request, requested_by) for report in free))
        finally:
            self._under_way -= identities
        busy = [
            blank(report, "refused", "it was flushed a moment ago, or is being flushed", requested_by, time.time())
            for report in targets
            if report not in free
        ]
        receipts = (*(receipt for process in flushed for receipt in process), *busy)
        for receipt in receipts:
            self.receipts.append(receipt)
            self._done(receipt)
        return FlushAnswer(uuid.uuid4().hex, receipts, sum(receipt.released_bytes for receipt in receipts))

    def _admit(self, targets: Sequence[AgentReport], request: FlushRequest) -> list[AgentReport]:
        """The targets that can be flushed now; raises if there is none."""
        now = self._clock()
        self._flushed_at = {who: at for who, at in self._flushed_at.items() if now - at < self.cooldown_seconds}
        idle = [report for report in targets if identity_of(report) not in self._under_way]
        if not idle:
            raise AlreadyUnderWay(f"a flush of {request.target} is under way; wait for its receipt")
        if request.dry_run:
            return idle
        rested = [report for report in idle if identity_of(report) not in self._flushed_at]
        if not rested:
            wait = self.cooldown_seconds - (now - max(self._flushed_at[identity_of(report)] for report in idle))
            raise CoolingDown(f"{request.target} was flushed a moment ago; flushing again costs speed", max(1.0, wait))
        return rested

    async def _process(self, report: AgentReport, request: FlushRequest, requested_by: str) -> list[Receipt]:
        receipts: list[Receipt] = []
        for allocator in dict.fromkeys(pool.allocator for pool in report.pools):
            receipts += await self._allocator(report, allocator, request, requested_by)
        return receipts or [blank(report, "nothing", "its agent sees no pool", requested_by, time.time())]

    async def _allocator(
        self, report: AgentReport, allocator: str, request: FlushRequest, requested_by: str
    ) -> list[Receipt]:
        identity = identity_of(report)
        started_at, began = time.time(), self._clock()

        def receipt(outcome: Outcome, reason: str) -> Receipt:
            bare = blank(report, outcome, reason, requested_by, started_at)
            return replace(bare, allocator=allocator, duration_seconds=self._clock() - began)

        reported = sum(pool.reclaimable.likely for pool in report.pools if pool.allocator == allocator)
        if reported < request.min_reclaimable_bytes:
            reason = f"{reported} bytes are reclaimable, asked for at least {request.min_reclaimable_bytes}"
            return [receipt("nothing", reason)]
        frame = Flush(uuid.uuid4().hex, allocator, request.steps, request.dry_run, request.timeout_seconds)
        async with self._turns.of(report):
            started_at, began = time.time(), self._clock()
            silent = self._turns.unanswering(report, self._agents.flushing)
            if silent is not None:
                return [receipt("refused", f"pid {silent.pid} of the same workload or job may be in a flush still")]
            told_before = self._told(identity)
            before = await self._driver_counts(identity)
            result = await self._agents.flush(identity, frame)
            if result is None:
                self._turns.unanswered(report)
        if result is None:
            return [receipt("timeout", f"the agent did not answer within {request.timeout_seconds:g} s, or left")]
        if result.outcome not in ("planned", "refused", "deferred"):
            self._flushed_at[identity] = self._clock()
        after = before if request.dry_run else await self._settled(identity, before, result.pools)
        if not result.pools:
            return [replace(receipt(result.outcome, result.reason), steps=result.steps)]
        bare = receipt(result.outcome, result.reason)
        told_after = self._told(identity)
        told = [pool for seen in (told_before, told_after) for pool in (seen.pools if seen else ())]
        receipts = [verify(bare, result, change, moved(change, told), before, after) for change in result.pools]
        return [with_thrash(one, told_before, told_after) for one in receipts]

    async def _settled(self, identity: Identity, before: DriverCounts, changes: Iterable[PoolChange]) -> DriverCounts:
        """The driver's counts once they show what was released, or have not moved for a second, or time is up."""
        released: dict[str, int] = {}
        for change in changes:
            device = change.before.device_uuid
            released[device] = released.get(device, 0) + change.before.held_bytes - change.after.held_bytes
        began = moved = self._clock()
        counts, pause = await self._driver_counts(identity), 0.02
        while any(
            before[device] - counts[device] < amount
            for device, amount in released.items()
            if device in before and device in counts
        ):
            now = self._clock()
            if now - began > self._settle or now - moved > STABLE_SECONDS:
                break
            await asyncio.sleep(pause)
            pause = min(0.2, pause * 1.5)
            latest = await self._driver_counts(identity)
            moved = self._clock() if latest != counts else moved
            counts = latest
        return counts

    def _told(self, identity: Identity) -> AgentReport | None:
        return next((report for report in self._agents.reports() if identity_of(report) == identity), None)

    async def _driver_counts(self, identity: Identity) -> DriverCounts:
        reading = await self._read_driver()
        return {
            device.uuid: process.used_bytes
            for device in (reading.devices if reading else ())
            for process in device.processes or ()
            if (process.pid, process.start_ticks) == (identity.pid, identity.start_ticks)
            and process.used_bytes is not None
        }
