"""A flush that proves itself: plan, run, verify, receipt.

The driver's count for the process is read, its agent flushes one allocator and tells what its pools
held before and after, and the driver is read again until its count has settled. Processes that
share a device take turns: a flush stalls its device, and ranks of one program must not stall at once.

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
    Held,
    Outcome,
    PoolUsage,
    Reading,
    Receipt,
)
from gpumond.wire import Flush, PoolChange, Result

SETTLE_SECONDS = 5.0
STABLE_SECONDS = 1.0
COOLDOWN_SECONDS = 30.0
RECEIPTS_KEPT = 1000

DriverCounts = dict[str, int]
"""Bytes of one process by device, as the driver counts them."""


class Agents(Protocol):
    def reports(self) -> Sequence[AgentReport]: ...
    async def flush(self, identity: Identity, request: Flush) -> Result | None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a flush concerns: exactly one of the four."""

    pid: int | None = None
    device: str | None = None
    workload: str | None = None
    all: bool = False

    def matches(self, report: AgentReport) -> bool:
        if self.pid is not None:
            return report.pid == self.pid
        if self.device is not None:
            return any(pool.device_uuid == self.device for pool in report.pools)
        if self.workload is not None:
            return report.workload == self.workload
        return self.all

    def __str__(self) -> str:
        names = (("pid", self.pid), ("device", self.device), ("workload", self.workload))
        return next((f"{name} {value}" for name, value in names if value is not None), "all")


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
        self._cooldown, self._settle = cooldown_seconds, settle_seconds
        self._under_way: set[Identity] = set()
        self._flushed_at: dict[Identity, float] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushAnswer:
        """Answers when all of it is over. Raises NoSuchTarget, AlreadyUnderWay or CoolingDown if nothing can start."""
        targets = [report for report in self._agents.reports() if request.target.matches(report)]
        if not targets:
            raise NoSuchTarget(f"no connected agent matches {request.target}; `gpumond status` lists the agents")
        free = self._admit(targets, request)
        identities = {_identity(report) for report in free}
        self._under_way |= identities
        try:
            flushed = await asyncio.gather(*(self._process(report, request, requested_by) for report in free))
        finally:
            self._under_way -= identities
        busy = [
            _receipt(report, "refused", "it was flushed a moment ago, or is being flushed", requested_by)
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
        self._flushed_at = {who: at for who, at in self._flushed_at.items() if now - at < self._cooldown}
        idle = [report for report in targets if _identity(report) not in self._under_way]
        if not idle:
            raise AlreadyUnderWay(f"a flush of {request.target} is under way; wait for its receipt")
        if request.dry_run:
            return idle
        rested = [report for report in idle if _identity(report) not in self._flushed_at]
        if not rested:
            wait = self._cooldown - (now - max(self._flushed_at[_identity(report)] for report in idle))
            raise CoolingDown(f"{request.target} was flushed a moment ago; flushing again costs speed", max(1.0, wait))
        return rested

    async def _process(self, report: AgentReport, request: FlushRequest, requested_by: str) -> list[Receipt]:
        devices = sorted({pool.device_uuid for pool in report.pools})
        turns = [self._turns.setdefault(device, asyncio.Lock()) for device in devices]
        for turn in turns:
            await turn.acquire()
        try:
            receipts: list[Receipt] = []
            for allocator in dict.fromkeys(pool.allocator for pool in report.pools):
                receipts += await self._allocator(report, allocator, request, requested_by)
            return receipts or [_receipt(report, "nothing", "its agent sees no pool", requested_by)]
        finally:
            for turn in turns:
                turn.release()

    async def _allocator(
        self, report: AgentReport, allocator: str, request: FlushRequest, requested_by: str
    ) -> list[Receipt]:
        identity = _identity(report)
        started_at, began = time.time(), self._clock()

        def receipt(outcome: Outcome, reason: str) -> Receipt:
            blank = _receipt(report, outcome, reason, requested_by)
            return replace(blank, allocator=allocator, started_at=started_at, duration_seconds=self._clock() - began)

        reported = sum(pool.reclaimable.likely for pool in report.pools if pool.allocator == allocator)
        if reported < request.min_reclaimable_bytes:
            reason = f"{reported} bytes are reclaimable, asked for at least {request.min_reclaimable_bytes}"
            return [receipt("nothing", reason)]
        told_before = self._told(identity)
        before = await self._driver_counts(identity)
        frame = Flush(uuid.uuid4().hex, allocator, request.steps, request.dry_run, request.timeout_seconds)
        result = await self._agents.flush(identity, frame)
        if result is None:
            return [receipt("timeout", f"the agent did not answer within {request.timeout_seconds:g} s, or left")]
        if result.outcome not in ("planned", "refused", "deferred"):
            self._flushed_at[identity] = self._clock()
        after = before if request.dry_run else await self._settled(identity, before, result.pools)
        if not result.pools:
            return [replace(receipt(result.outcome, result.reason), steps=result.steps)]
        blank = receipt(result.outcome, result.reason)
        told = [pool for seen in (told_before, self._told(identity)) for pool in (seen.pools if seen else ())]
        return [verify(blank, result, change, moved(change, told), before, after) for change in result.pools]

    async def _settled(self, identity: Identity, before: DriverCounts, changes: Iterable[PoolChange]) -> DriverCounts:
        """The driver's counts once they show what was released, or have not moved for a second, or time is up."""
        released: DriverCounts = {}
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
        return next((report for report in self._agents.reports() if _identity(report) == identity), None)

    async def _driver_counts(self, identity: Identity) -> DriverCounts:
        reading = await self._read_driver()
        return {
            device.uuid: process.used_bytes
            for device in (reading.devices if reading else ())
            for process in device.processes or ()
            if (process.pid, process.start_ticks) == (identity.pid, identity.start_ticks)
            and process.used_bytes is not None
        }


def moved(change: PoolChange, told: Iterable[PoolUsage]) -> bool:
    """Whether the program took or gave device memory just before or after what its agent saw of the flush.

    The driver is read a moment earlier and a moment later than that. ``told`` are the agent's reports from
    around both: if they differ from what it saw, the program did something in between.
    """
    seen = {_takings(change.before), _takings(change.after)}
    pool = (change.before.allocator, change.before.device_uuid)
    return any(_takings(own) not in seen for own in told if (own.allocator, own.device_uuid) == pool)


def verify(
    receipt: Receipt, result: Result, change: PoolChange, has_moved: bool, before: DriverCounts, after: DriverCounts
) -> Receipt:
    """The receipt of one pool: what its allocator released, beside what the driver saw.

    The driver has the last word: a pool that says it freed memory which the driver still counts to
    the process was freed in part, unless the program allocated meanwhile.
    """
    device = change.before.device_uuid
    released = change.before.held_bytes - change.after.held_bytes
    driver_before, driver_after = before.get(device), after.get(device)
    seen = None if driver_before is None or driver_after is None else driver_before - driver_after
    raced = change.raced or (has_moved and seen not in (None, released))
    outcome, reason = result.outcome, result.reason
    if outcome == "freed" and seen is not None and seen < released and not raced:
        outcome, reason = "partial", f"the driver saw {seen} of {released} released bytes come back"
    planned = outcome == "planned"
    return replace(
        receipt,
        device_uuid=device,
        outcome=outcome,
        reason=reason,
        expected=change.expected,
        released_bytes=released,
        driver_released_bytes=None if planned else seen,
        before=_held(change.before, driver_before),
        after=None if planned else _held(change.after, driver_after),
        steps=result.steps,
        raced=raced,
    )


def _takings(pool: PoolUsage) -> tuple[int | None, ...]:
    return pool.held_bytes, pool.device_allocations, pool.device_frees


def _held(pool: PoolUsage, driver_used: int | None) -> Held:
    return Held(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, driver_used)


def _identity(report: AgentReport) -> Identity:
    return Identity(report.pid, report.start_ticks, report.uid)


def _receipt(report: AgentReport, outcome: Outcome, reason: str, requested_by: str) -> Receipt:
    return Receipt(
        pid=report.pid,
        workload=report.workload,
        device_uuid=None,
        allocator=None,
        outcome=outcome,
        reason=reason,
        expected=None,
        released_bytes=0,
        driver_released_bytes=None,
        before=None,
        after=None,
        steps=(),
        raced=False,
        requested_by=requested_by,
        started_at=time.time(),
        duration_seconds=0.0,
    )
