"""Verified flushes: plan, execute, verify, receipt. `Locks` separates flushes that must not run at the same time."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Protocol
from weakref import WeakValueDictionary

from gpumond.facts.errors import AlreadyUnderWay, CoolingDown, NoSuchTarget
from gpumond.facts.flush import FlushOutcome, FlushRequest, empty_receipt
from gpumond.facts.messages import FlushCommand, FlushResult, PoolChange
from gpumond.facts.pools import ENGINE_STEP, SUSPENDED, Outcome, Receipt, ordered_steps as ordered_steps
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, Reading
from gpumond.facts.units import human
from gpumond.features.flush.receipts import (
    DriverCounts,
    Plans,
    Promises,
    had_effect,
    has_changed_around,
    of_driver,
    of_reported,
    pool_of,
    verify,
    with_thrash,
)
from gpumond.host.peer import Identity
from gpumond.kernel import EngineStep

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


SETTLE_SECONDS = 5.0
STABLE_SECONDS = 1.0
COOLDOWN_SECONDS = 30.0
PERSON_COOLDOWN_SECONDS = 5.0
"""Longest wait of a user between two flushes of a process; a rule waits the whole cooldown."""
RECEIPTS_KEPT = 1000


class AgentConnections(Protocol):
    def reports(self) -> Sequence[AgentReport]: ...
    def report(self, identity: Identity) -> AgentReport | None: ...
    async def flush(self, identity: Identity, request: FlushCommand) -> FlushResult | None: ...
    def flushing(self, identity: Identity) -> bool: ...


class Flusher:
    """Executor of flushes, one at a time for a process; keeps their receipts."""

    def __init__(
        self,
        agents: AgentConnections,
        read_driver: Callable[[], Awaitable[Reading | None]],
        *,
        done: Callable[[Receipt], None] = lambda receipt: None,
        cooldown_seconds: float = COOLDOWN_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
        neighbour_seconds: float = NEIGHBOUR_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        engines: EngineStep | None = None,
        keep: Callable[[Receipt], Awaitable[None]] | None = None,
    ) -> None:
        """``keep`` stores the receipt of a serving engine that was returned to service after its flush."""
        self.receipts: deque[Receipt] = deque(maxlen=RECEIPTS_KEPT)
        self._agents, self._read_driver, self._done, self._clock = agents, read_driver, done, clock
        self.cooldown_seconds, self._settle_seconds = cooldown_seconds, settle_seconds
        self._under_way: dict[Identity, FlushRequest] = {}
        self._flushed_at: dict[Identity, float] = {}
        self._locks = Locks(neighbour_seconds)
        self._plans = Plans()
        self._keep = keep
        self._engines = engines
        if engines:
            engines.attach(lambda: self.receipts, self._returned)

    def resume(self) -> None:
        """Continue to return serving engines to service, as the previous daemon did."""
        if self._engines:
            self._engines.resume()

    async def close(self) -> None:
        if self._engines:
            await self._engines.close()

    async def _returned(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        self._done(receipt)
        if self._keep is not None:
            await self._keep(receipt)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        """Flush and return when all is finished. Raises NoSuchTarget, AlreadyUnderWay or CoolingDown if nothing
        can start.

        Of several targets those that cannot start now are refused, each with its receipt. Serving engines follow the
        programs, one after the other.
        """
        reports = self._agents.reports()
        names = await self._engine_names(request, reports)
        steps = tuple(step for step in request.steps if step != ENGINE_STEP)
        targets = [report for report in reports if steps and request.target.matches(report)]
        if not targets and not names:
            if not steps:
                where = "declare it under engines: in the configuration"
                raise NoSuchTarget(f"no declared serving engine matches {request.target}; {where}")
            raise NoSuchTarget(f"no connected agent matches {request.target}; `gpumond status` lists the agents")
        whole, request = request, replace(request, steps=steps)
        refusals = {} if request.dry_run else self._refusals(targets, request)
        free = [report for report in targets if identity_of(report) not in refusals]
        if not request.dry_run:
            self._under_way |= {identity_of(report): request for report in free}
        promises = self._plans.promises(requested_by, request.plan)
        try:
            flushed = await asyncio.gather(*(self._process(report, request, requested_by, promises) for report in free))
        finally:
            for report in free:
                self._finish(report, request)
        refused = [
            empty_receipt(report, "refused", refusals[identity_of(report)], requested_by, time.time())
            for report in targets
            if identity_of(report) in refusals
        ]
        engines = [await self._flush_engine(name, whole, requested_by) for name in names]
        receipts = (
            *(each for process in flushed for each in process),
            *refused,
            *(one for own in engines for one in own),
        )
        for receipt in receipts:
            self.receipts.append(receipt)
            self._done(receipt)
        answer = FlushOutcome(uuid.uuid4().hex, receipts, sum(receipt.released_bytes for receipt in receipts))
        if request.dry_run:
            self._plans.keep(requested_by, answer.id, receipts)
        return answer

    async def _engine_names(self, request: FlushRequest, reports: Sequence[AgentReport]) -> list[str]:
        if self._engines is None or ENGINE_STEP not in request.steps:
            return []
        workloads = {report.key: report.workload for report in reports}
        devices: dict[ProcessKey, set[str]] = {}
        reading = await self._read_driver() if request.target.device is not None else None
        for device in reading.devices if reading else ():
            for key in device.processes_by_key:
                devices.setdefault(key, set()).add(device.uuid)
        readings = self._engines.readings()
        return [each.name for each in readings if request.target.matches_engine(each, workloads, devices)]

    async def _flush_engine(self, name: str, request: FlushRequest, requested_by: str) -> list[Receipt]:
        assert self._engines is not None
        promises = self._plans.promises(requested_by, request.plan)
        receipts = await self._engines.flush(name, request, requested_by)
        return [replace(receipt, planned=promises.get(pool_of(receipt))) for receipt in receipts]

    def _refusals(self, targets: Sequence[AgentReport], request: FlushRequest) -> dict[Identity, str]:
        """Return the targets that cannot be flushed now, each with the reason; raises if none of them can."""
        now, rest = self._clock(), self.cooldown_seconds
        self._flushed_at = {who: at for who, at in self._flushed_at.items() if now - at < rest}
        rest = rest if request.by_rule else min(rest, PERSON_COOLDOWN_SECONDS)
        refusals: dict[Identity, str] = {}
        resting: dict[float, str] = {}
        for report in targets:
            who = identity_of(report)
            ago = now - self._flushed_at.get(who, float("-inf"))
            if who in self._under_way:
                refusals[who] = "another flush of this program is in progress; wait for its receipt"
            elif ago < rest and not request.force:
                refusals[who] = resting[rest - ago] = _resting(ago, rest - ago)
        if len(refusals) == len(targets):
            if resting:
                wait = max(resting)
                raise CoolingDown(f"{request.target}: {resting[wait]}", max(1.0, wait))
            if request.target.pid is not None:
                raise AlreadyUnderWay(f"a flush of {request.target} is in progress; wait for its receipt")
        return refusals

    def _finish(self, report: AgentReport, request: FlushRequest) -> None:
        if self._under_way.get(identity_of(report)) is request:
            del self._under_way[identity_of(report)]

    async def _process(
        self, report: AgentReport, request: FlushRequest, requested_by: str, promises: Promises
    ) -> list[Receipt]:
        if report.suspended:
            self._finish(report, request)
            return [empty_receipt(report, "deferred", SUSPENDED, requested_by, time.time())]
        receipts: list[Receipt] = []
        functions = ("",) if "hooks" in request.steps else ()  # the program's own, if it has no pool
        for allocator in dict.fromkeys(pool.allocator for pool in report.pools) or functions:
            if receipts and receipts[-1].outcome == "timeout":
                break
            receipts += await self._allocator(report, allocator, request, requested_by)
        self._finish(report, request)
        receipts = receipts or [
            empty_receipt(report, "nothing", "its agent reports no pool", requested_by, time.time())
        ]
        return [replace(receipt, planned=promises.get(pool_of(receipt))) for receipt in receipts]

    async def _allocator(
        self, report: AgentReport, allocator: str, request: FlushRequest, requested_by: str
    ) -> list[Receipt]:
        identity = identity_of(report)
        started_at, began = time.time(), self._clock()

        def receipt(outcome: Outcome, reason: str) -> Receipt:
            bare = empty_receipt(report, outcome, reason, requested_by, started_at)
            return replace(bare, allocator=allocator or None, duration_seconds=self._clock() - began)

        reported = sum(pool.reclaimable.likely for pool in report.pools if pool.allocator == allocator)
        if reported < request.min_reclaimable_bytes:
            reason = f"{human(reported)} is reclaimable, less than the {human(request.min_reclaimable_bytes)} requested"
            return [receipt("nothing", reason)]
        order = FlushCommand(uuid.uuid4().hex, allocator, request.steps, request.dry_run, request.timeout_seconds)
        async with nullcontext() if request.dry_run else self._locks.held(report):
            started_at, began = time.time(), self._clock()
            silent = None if request.dry_run else self._locks.unanswering(report, self._agents.flushing)
            if silent is not None:
                reason = f"pid {silent.pid} of the same workload or job may still be executing a flush"
                return [receipt("refused", reason)]
            report_before = self._agents.report(identity)
            before = await self._driver_counts(identity)
            result = await self._agents.flush(identity, order)
            if result is None and not request.dry_run:
                self._locks.unanswered(report)
        if result is None:
            now = self._agents.report(identity)
            if now is not None and now.suspended:
                return [receipt("deferred", SUSPENDED)]
            return [
                receipt("timeout", f"the agent did not answer within {request.timeout_seconds:g} s, or disconnected")
            ]
        reported_pools = (*report.pools, *(report_before.pools if report_before else ()))
        result = of_reported(result, allocator, reported_pools, request.steps)
        if had_effect(result):
            self._flushed_at[identity] = self._clock()
        called = not allocator and bool(result.steps)
        after = before if request.dry_run else await self._wait_for_release(identity, before, result.pools, called)
        if not result.pools:
            bare = replace(receipt(result.outcome, result.reason), steps=result.steps)
            return [bare] if allocator else of_driver(bare, before, after)
        bare = receipt(result.outcome, result.reason)
        report_after = self._agents.report(identity)
        reported_by_agent = [
            pool for report in (report_before, report_after) for pool in (report.pools if report else ())
        ]
        receipts = [
            verify(bare, result, change, has_changed_around(change, reported_by_agent), before, after)
            for change in result.pools
        ]
        return [with_thrash(one, report_before, report_after) for one in receipts]

    async def _wait_for_release(
        self, identity: Identity, before: DriverCounts, changes: Iterable[PoolChange], unknown: bool
    ) -> DriverCounts:
        """Return the driver's counts once they show the release, have been stable for a second, or time is up.

        ``unknown``: the released bytes are unknown.
        """
        released: dict[str, int] = {}
        for change in changes:
            device = change.before.device_uuid
            released[device] = released.get(device, 0) + change.before.held_bytes - change.after.held_bytes
        started_at = changed_at = self._clock()
        counts, pause = await self._driver_counts(identity), 0.02
        while unknown or any(
            before.used[device] - counts.used[device] < amount
            for device, amount in released.items()
            if device in before.used and device in counts.used
        ):
            now = self._clock()
            if now - started_at > self._settle_seconds or now - changed_at > STABLE_SECONDS:
                break
            await asyncio.sleep(pause)
            pause = min(0.2, pause * 1.5)
            latest = await self._driver_counts(identity)
            changed_at = self._clock() if latest != counts else changed_at
            counts = latest
        return counts

    async def _driver_counts(self, identity: Identity) -> DriverCounts:
        reading = await self._read_driver()
        devices = reading.devices if reading else ()
        listed = ((device.uuid, device.processes_by_key.get(identity.process)) for device in devices)
        used = {uuid: process.used_bytes for uuid, process in listed if process and process.used_bytes is not None}
        return DriverCounts(used, {device.uuid: device.size_bytes for device in devices if device.size_bytes})


def _resting(ago: float, wait: float) -> str:
    again = f"the next flush is allowed in {math.ceil(wait)} s"
    return f'it was flushed {ago:.0f} s ago; {again}, or now with --force (in a request: "force": true)'
