"""Verified flushes: plan, execute, verify, receipt. `FlushLocks` separates flushes that must not run at the same time.

`verified_receipt` compares the bytes that the agent reports as released with the driver's count, without I/O.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from gpumond.config.settings import Settings
from gpumond.core import Core, EngineStep, FlushService, Part
from gpumond.facts.errors import (
    CONDITION_REMEDIES,
    CooldownActive,
    FlushError,
    FlushInProgress,
    NoSuchTarget,
    StoreUnavailable,
)
from gpumond.facts.flush import FlushRequest, FlushResponse, empty_receipt, no_agent_error
from gpumond.facts.messages import FlushCommand, FlushResult, PoolChange
from gpumond.facts.pools import (
    API_FORCE_HINT,
    ENGINE_STEP,
    SUSPENDED_REASON,
    ExpectedRelease,
    FlushOutcome,
    PoolBytes,
    PoolUsage,
    Receipt,
)
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, Reading
from gpumond.facts.units import size_text
from gpumond.features.flush.alertmanager_hook import AlertmanagerHook
from gpumond.host.peer import PeerIdentity
from gpumond.programs.agent_server import AgentServer, identity_of
from gpumond.store.table import to_text


class DriverCounts(NamedTuple):
    """Driver's count for one process and the device's size in bytes, by device. Unknown is absent."""

    used_bytes: Mapping[str, int]
    size_bytes: Mapping[str, int]


def drop_unreported(
    result: FlushResult, allocator: str, reported_pools: Iterable[PoolUsage], steps: Sequence[str]
) -> FlushResult:
    """Return the agent's answer without pools that it hasn't reported and steps that weren't requested, each once."""
    uuids = {pool.device_uuid for pool in reported_pools if pool.allocator == allocator}
    pools: dict[str, PoolChange] = {}
    for change in result.pools:
        device_uuid = change.before.device_uuid
        if device_uuid in uuids and device_uuid == change.after.device_uuid and change.before.allocator == allocator:
            pools.setdefault(device_uuid, change)
    executed = {step.step: step for step in reversed(result.steps) if step.step in steps}
    return replace(
        result, pools=tuple(pools.values()), steps=tuple(executed[step] for step in steps if step in executed)
    )


def had_effect(result: FlushResult) -> bool:
    """Return True if a flush changed anything, so the cooldown starts."""
    return result.outcome in ("freed", "partial", "failed") or any(
        change.after.held_bytes < change.before.held_bytes
        or (change.after.live_bytes or 0) < (change.before.live_bytes or 0)
        for change in result.pools
    )


def has_changed_around(change: PoolChange, pools: Iterable[PoolUsage]) -> bool:
    """Return True if the program allocated or freed device memory just before or after the flush.

    The driver is read a moment before and a moment after the agent reads its pools. ``pools`` are the agent's
    reports around both: if they differ from its pools, the program changed its memory in between.
    """
    known_states = {_allocation_state(change.before), _allocation_state(change.after)}
    pool_key = (change.before.allocator, change.before.device_uuid)
    return any(
        _allocation_state(pool) not in known_states for pool in pools if (pool.allocator, pool.device_uuid) == pool_key
    )


def verified_receipt(
    receipt: Receipt,
    result: FlushResult,
    change: PoolChange,
    has_changed: bool,
    before: DriverCounts,
    after: DriverCounts,
) -> Receipt:
    """Make the receipt of one pool: the bytes that its allocator released, and those that the driver counts as
    released.

    The driver decides: memory that an allocator reports as freed and that the driver still counts for the process
    was freed in part, unless the program allocated meanwhile. An impossible release counts as 0, and the reason
    states it.
    """
    device_uuid = change.before.device_uuid
    reported_bytes = change.before.held_bytes - change.after.held_bytes
    driver_before, driver_after = before.used_bytes.get(device_uuid), after.used_bytes.get(device_uuid)
    if change.before.managed:  # not part of the driver's count for the process
        driver_before = driver_after = None
    driver_released = None if driver_before is None or driver_after is None else driver_before - driver_after
    raced = change.raced or (has_changed and driver_released not in (None, reported_bytes))
    outcome, reason = result.outcome, result.reason
    released_bytes, implausibility = _plausible_bytes(reported_bytes, driver_before, before.size_bytes.get(device_uuid))
    if implausibility:
        outcome = "nothing" if outcome in ("freed", "partial") else outcome
        reason = "; ".join(filter(None, (reason, implausibility)))
    elif outcome == "freed" and driver_released is not None and driver_released < released_bytes and not raced:
        outcome = "partial"
        reason = f"the driver counts only {size_text(driver_released)} of {size_text(released_bytes)} as released"
    if outcome == "nothing" and not reason and change.before.live_bytes is not None:
        reason = _no_cache_reason(change.before)
    if change.before.live_bytes is None:
        reason = "; ".join(filter(None, (reason, CONDITION_REMEDIES["live_unknown"])))
    is_planned = outcome == "planned"
    return replace(
        receipt,
        device_uuid=device_uuid,
        outcome=outcome,
        reason=reason,
        expected=change.expected,
        released_bytes=released_bytes,
        driver_released_bytes=None if is_planned else driver_released,
        before=_pool_bytes(change.before, driver_before),
        after=None if is_planned else _pool_bytes(change.after, driver_after),
        steps=result.steps,
        raced=raced,
    )


def _no_cache_reason(pool: PoolUsage) -> str:
    """Return why a flush of a pool without cached bytes released none; empty if the pool may have some."""
    if pool.reclaimable.likely or not pool.held_known:
        return ""
    stranded = pool.stranded_bytes
    return "no cached bytes" + (f"; {size_text(stranded)} stranded, which a flush can't release" if stranded else "")


def driver_receipts(receipt: Receipt, before: DriverCounts, after: DriverCounts) -> list[Receipt]:
    """Make the receipts of functions of a program without pools, by device: only the driver counts their effect."""
    if receipt.outcome != "nothing" or not receipt.steps:
        return [receipt]
    receipts = []
    for device_uuid, used_before in sorted(before.used_bytes.items()):
        used_after = after.used_bytes.get(device_uuid)
        released = None if used_after is None else used_before - used_after
        outcome: FlushOutcome = "freed" if released and released > 0 else "nothing"
        device_receipt = replace(receipt, device_uuid=device_uuid, outcome=outcome, driver_released_bytes=released)
        receipts.append(replace(device_receipt, released_bytes=max(0, released or 0)))
    return receipts or [receipt]


def _plausible_bytes(reported_bytes: int, driver_used_bytes: int | None, size_bytes: int | None) -> tuple[int, str]:
    """Return the bytes that count as released, and the reason if they differ from the agent's."""
    if reported_bytes < 0:
        return 0, f"the pool holds {size_text(-reported_bytes)} more than before"
    if driver_used_bytes is not None and reported_bytes > driver_used_bytes:
        return 0, _impossible_reason(reported_bytes, f"the driver counted only {size_text(driver_used_bytes)} before")
    if size_bytes is not None and reported_bytes > size_bytes:
        return 0, _impossible_reason(reported_bytes, f"the GPU has only {size_text(size_bytes)}")
    return reported_bytes, ""


def _impossible_reason(reported_bytes: int, bound: str) -> str:
    return f"the agent's report of {size_text(reported_bytes)} released isn't counted, because {bound}"


def with_refill_note(receipt: Receipt, before: AgentReport | None, after: AgentReport | None) -> Receipt:
    """Return the receipt, with a note if the agent observed that the program allocated its memory again."""
    if before is None or after is None or _refilled_flushes(receipt, after) <= _refilled_flushes(receipt, before):
        return receipt
    reasons = (
        receipt.reason,
        "refilled: the program took back at least half of the released memory within ten seconds",
    )
    return replace(receipt, reason="; ".join(filter(None, reasons)))


def _refilled_flushes(receipt: Receipt, report: AgentReport) -> int:
    pool_key = (receipt.allocator, receipt.device_uuid)
    return sum(pool.refilled_flushes for pool in report.pools if (pool.allocator, pool.device_uuid) == pool_key)


def _allocation_state(pool: PoolUsage) -> tuple[int | None, ...]:
    return pool.held_bytes, pool.device_allocations, pool.device_frees


def _pool_bytes(pool: PoolUsage, driver_used_bytes: int | None) -> PoolBytes:
    return PoolBytes(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, driver_used_bytes)


MAX_PLANS_PER_REQUESTER = 8
MAX_REQUESTERS = 64

PoolKey = tuple[ProcessKey, str | None, str | None]
"""Process, allocator and device"""

Predictions = Mapping[PoolKey, ExpectedRelease]


def pool_key_of(receipt: Receipt) -> PoolKey:
    return ProcessKey(receipt.pid, receipt.start_ticks), receipt.allocator, receipt.device_uuid


class Plans:
    """Newest plans of each requester, so no requester's plans displace another's."""

    def __init__(self) -> None:
        self._by_requester: dict[str, dict[str, Predictions]] = {}

    def add(self, requested_by: str, plan: str, receipts: Iterable[Receipt]) -> None:
        plans = self._by_requester.pop(requested_by, {})
        plans[plan] = {pool_key_of(receipt): receipt.expected for receipt in receipts if receipt.expected}
        self._by_requester[requested_by] = dict([*plans.items()][-MAX_PLANS_PER_REQUESTER:])
        if len(self._by_requester) > MAX_REQUESTERS:
            del self._by_requester[next(iter(self._by_requester))]

    def predictions(self, requested_by: str, plan: str | None) -> Predictions:
        """Return the estimates of a plan; empty if it is unknown or expired."""
        return self._by_requester.get(requested_by, {}).get(plan or "", {})


MAX_NEIGHBOR_WAIT_SECONDS = 5.0


class FlushLocks:
    """Locks of flushes that must not run at the same time.

    ``max_neighbor_wait_seconds``: the longest total wait of a flush for those of other users on its devices.
    """

    def __init__(self, max_neighbor_wait_seconds: float = MAX_NEIGHBOR_WAIT_SECONDS) -> None:
        self._max_neighbor_wait_seconds = max_neighbor_wait_seconds
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unresponsive: dict[str, PeerIdentity] = {}
        """By group: the process that did not answer its last flush in time."""

    @asynccontextmanager
    async def hold(self, report: AgentReport) -> AsyncIterator[None]:
        """Hold the locks of this process: none of its user's processes on its devices or in its groups is
        flushed meanwhile.

        The locks of its user come first, so at most one process of each user waits for a device.
        """
        devices = sorted({pool.device_uuid for pool in report.pools})
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._max_neighbor_wait_seconds
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

    def mark_unresponsive(self, report: AgentReport) -> None:
        """Record that its locks are free again, while its flush may still run."""
        self._unresponsive |= dict.fromkeys(_groups(report), identity_of(report))

    def unresponsive_neighbor(
        self, report: AgentReport, is_flushing: Callable[[PeerIdentity], bool]
    ) -> PeerIdentity | None:
        """Return a process of its groups that has not answered its last flush and may still execute it."""
        self._unresponsive = {name: identity for name, identity in self._unresponsive.items() if is_flushing(identity)}
        others = (self._unresponsive.get(name) for name in _groups(report))
        return next((identity for identity in others if identity not in (None, identity_of(report))), None)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _groups(report: AgentReport) -> list[str]:
    """Return the exclusion groups of this process. Unnamed workloads of one user share a group."""
    ranks = [f"ranks of uid {report.uid}"] if report.program.distributed else []
    return [f"workload {report.workload!r} of uid {report.uid}", *ranks]


SETTLE_SECONDS = 5.0
"""Longest wait until the driver's counts show a release."""
STABLE_SECONDS = 1.0
"""Time after which counts that have not changed are final."""
COOLDOWN_SECONDS = 30.0
MANUAL_COOLDOWN_SECONDS = 5.0
"""Longest cooldown for a flush that a user requests; a rule waits for the whole ``cooldown_seconds``."""
MAX_RECEIPTS = 1000


class Flusher:
    """Executor of flushes, one at a time for a process; keeps their receipts."""

    def __init__(
        self,
        agents: AgentServer,
        read_driver: Callable[[], Awaitable[Reading | None]],
        *,
        on_receipt: Callable[[Receipt], None] = lambda receipt: None,
        cooldown_seconds: float = COOLDOWN_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
        max_neighbor_wait_seconds: float = MAX_NEIGHBOR_WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        engine_step: EngineStep | None = None,
        store_receipt: Callable[[Receipt], Awaitable[None]] | None = None,
    ) -> None:
        """``store_receipt`` stores the receipt of a serving engine that was returned to service after its flush."""
        self.receipts: deque[Receipt] = deque(maxlen=MAX_RECEIPTS)
        self._agents, self._read_driver, self._on_receipt, self._clock = agents, read_driver, on_receipt, clock
        self.cooldown_seconds, self._settle_seconds = cooldown_seconds, settle_seconds
        self._under_way: dict[PeerIdentity, FlushRequest] = {}
        self._flushed_at: dict[PeerIdentity, float] = {}
        self._locks = FlushLocks(max_neighbor_wait_seconds)
        self._plans = Plans()
        self._store_receipt = store_receipt
        self._engine_step = engine_step
        if engine_step:
            engine_step.use_receipts(lambda: self.receipts, self._record)

    def resume_engine_restorations(self) -> None:
        """Continue to return serving engines to service, as the previous daemon did."""
        if self._engine_step:
            self._engine_step.resume_restorations()

    async def close(self) -> None:
        if self._engine_step:
            await self._engine_step.close()

    async def _record(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        self._on_receipt(receipt)
        if self._store_receipt is not None:
            await self._store_receipt(receipt)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        """Flush and return when all is finished. Raises NoSuchTarget, FlushInProgress or CooldownActive if nothing
        can start.

        Of several targets those that cannot start now are refused, each with its receipt. Serving engines follow the
        programs, one after the other.
        """
        reports = self._agents.reports()
        engine_names = await self._engine_names(request, reports)
        steps = tuple(step for step in request.steps if step != ENGINE_STEP)
        targets = [report for report in reports if steps and request.target.matches(report)]
        if not targets and not engine_names:
            if not steps:
                where = "list it under engines: in the configuration"
                raise NoSuchTarget(f"no configured serving engine matches {request.target}; {where}")
            raise no_agent_error(request.target, reports)
        original, request = request, replace(request, steps=steps)
        refusals = {} if request.dry_run else self._refusals(targets, request)
        ready = [report for report in targets if identity_of(report) not in refusals]
        if not request.dry_run:
            self._under_way |= {identity_of(report): request for report in ready}
        predictions = self._plans.predictions(requested_by, request.plan)
        try:
            flushed = await asyncio.gather(
                *(self._flush_program(report, request, requested_by, predictions) for report in ready)
            )
        finally:
            for report in ready:
                self._end_flush(report, request)
        refused = [
            empty_receipt(report, "refused", refusals[identity_of(report)], requested_by, time.time())
            for report in targets
            if identity_of(report) in refusals
        ]
        engine_receipts = [await self._flush_engine(name, original, requested_by) for name in engine_names]
        receipts = tuple(
            replace(each, requested_for=request.requested_for)
            for each in (*chain.from_iterable(flushed), *refused, *chain.from_iterable(engine_receipts))
        )
        answer = FlushResponse(uuid.uuid4().hex, receipts, sum(receipt.released_bytes for receipt in receipts))
        if request.dry_run:  # whatever its outcome, it is a plan and no flush
            self._plans.add(requested_by, answer.id, receipts)
            return answer
        for receipt in receipts:
            self.receipts.append(receipt)
            self._on_receipt(receipt)
        return answer

    async def _engine_names(self, request: FlushRequest, reports: Sequence[AgentReport]) -> list[str]:
        if self._engine_step is None or ENGINE_STEP not in request.steps:
            return []
        workloads = {report.key: report.workload for report in reports}
        devices: dict[ProcessKey, set[str]] = {}
        reading = await self._read_driver() if request.target.device is not None else None
        for device in reading.devices if reading else ():
            for key in device.processes_by_key:
                devices.setdefault(key, set()).add(device.uuid)
        readings = self._engine_step.readings()
        return [each.name for each in readings if request.target.matches_engine(each, workloads, devices)]

    async def _flush_engine(self, name: str, request: FlushRequest, requested_by: str) -> list[Receipt]:
        assert self._engine_step is not None
        predictions = self._plans.predictions(requested_by, request.plan)
        receipts = await self._engine_step.flush(name, request, requested_by)
        return [replace(receipt, planned=predictions.get(pool_key_of(receipt))) for receipt in receipts]

    def _refusals(self, targets: Sequence[AgentReport], request: FlushRequest) -> dict[PeerIdentity, str]:
        """Return the targets that cannot be flushed now, each with the reason; raises if none of them can."""
        now, cooldown_seconds = self._clock(), self.cooldown_seconds
        self._flushed_at = {
            identity: flushed_at
            for identity, flushed_at in self._flushed_at.items()
            if now - flushed_at < cooldown_seconds
        }
        cooldown_seconds = cooldown_seconds if request.by_rule else min(cooldown_seconds, MANUAL_COOLDOWN_SECONDS)
        refusals: dict[PeerIdentity, str] = {}
        cooldown_messages: dict[float, str] = {}
        for report in targets:
            identity = identity_of(report)
            elapsed_seconds = now - self._flushed_at.get(identity, float("-inf"))
            if identity in self._under_way:
                refusals[identity] = "another flush of this program is in progress; wait for its receipt"
            elif elapsed_seconds < cooldown_seconds and not request.force:
                wait_seconds = cooldown_seconds - elapsed_seconds
                refusals[identity] = _cooldown_message(report, elapsed_seconds, wait_seconds)
                cooldown_messages[wait_seconds] = refusals[identity]
        if len(refusals) == len(targets):
            if cooldown_messages:
                longest = max(cooldown_messages)
                raise CooldownActive(cooldown_messages[longest], max(1.0, longest))
            if request.target.pid is not None:
                raise FlushInProgress(f"a flush of {request.target} is in progress; wait for its receipt")
        return refusals

    def _end_flush(self, report: AgentReport, request: FlushRequest) -> None:
        if self._under_way.get(identity_of(report)) is request:
            del self._under_way[identity_of(report)]

    async def _flush_program(
        self, report: AgentReport, request: FlushRequest, requested_by: str, predictions: Predictions
    ) -> list[Receipt]:
        if report.suspended:
            self._end_flush(report, request)
            return [empty_receipt(report, "deferred", SUSPENDED_REASON, requested_by, time.time())]
        receipts: list[Receipt] = []
        without_pools = ("",) if "hooks" in request.steps else ()  # only the program's own functions are called
        for allocator in dict.fromkeys(pool.allocator for pool in report.pools) or without_pools:
            if receipts and receipts[-1].outcome == "timeout":
                break
            receipts += await self._flush_allocator(report, allocator, request, requested_by)
        self._end_flush(report, request)
        receipts = receipts or [
            empty_receipt(report, "nothing", "the program has no memory pool on a GPU", requested_by, time.time())
        ]
        return [replace(receipt, planned=predictions.get(pool_key_of(receipt))) for receipt in receipts]

    async def _flush_allocator(
        self, report: AgentReport, allocator: str, request: FlushRequest, requested_by: str
    ) -> list[Receipt]:
        identity = identity_of(report)
        started_at, began = time.time(), self._clock()

        def receipt(outcome: FlushOutcome, reason: str) -> Receipt:
            base = empty_receipt(report, outcome, reason, requested_by, started_at)
            return replace(base, allocator=allocator or None, duration_seconds=self._clock() - began)

        reclaimable_bytes = sum(pool.reclaimable.likely for pool in report.pools if pool.allocator == allocator)
        if reclaimable_bytes < request.min_reclaimable_bytes:
            minimum = size_text(request.min_reclaimable_bytes)
            reason = f"{size_text(reclaimable_bytes)} is reclaimable, less than the requested minimum of {minimum}"
            return [receipt("nothing", reason)]
        command = FlushCommand(uuid.uuid4().hex, allocator, request.steps, request.dry_run, request.timeout_seconds)
        async with nullcontext() if request.dry_run else self._locks.hold(report):
            started_at, began = time.time(), self._clock()
            neighbor = None if request.dry_run else self._locks.unresponsive_neighbor(report, self._agents.is_flushing)
            if neighbor is not None:
                reason = f"pid {neighbor.pid} of the same workload or job may still be executing a flush"
                return [receipt("refused", reason)]
            report_before = self._agents.report(identity)
            before = await self._driver_counts(identity)
            result = await self._agents.flush(identity, command)
            if result is None and not request.dry_run:
                self._locks.mark_unresponsive(report)
        if result is None:
            latest_report = self._agents.report(identity)
            if latest_report is not None and latest_report.suspended:
                return [receipt("deferred", SUSPENDED_REASON)]
            return [
                receipt("timeout", f"the agent didn't respond within {request.timeout_seconds:g} s, or disconnected")
            ]
        reported_pools = (*report.pools, *(report_before.pools if report_before else ()))
        result = drop_unreported(result, allocator, reported_pools, request.steps)
        if had_effect(result):
            self._flushed_at[identity] = self._clock()
        ran_functions = not allocator and bool(result.steps)
        after = (
            before if request.dry_run else await self._wait_for_release(identity, before, result.pools, ran_functions)
        )
        if not result.pools:
            base = replace(receipt(result.outcome, result.reason), steps=result.steps)
            return [base] if allocator else driver_receipts(base, before, after)
        base = receipt(result.outcome, result.reason)
        report_after = self._agents.report(identity)
        reported_by_agent = [
            pool for report in (report_before, report_after) for pool in (report.pools if report else ())
        ]
        receipts = [
            verified_receipt(base, result, change, has_changed_around(change, reported_by_agent), before, after)
            for change in result.pools
        ]
        return [with_refill_note(pool_receipt, report_before, report_after) for pool_receipt in receipts]

    async def _wait_for_release(
        self, identity: PeerIdentity, before: DriverCounts, changes: Iterable[PoolChange], is_release_unknown: bool
    ) -> DriverCounts:
        """Return the driver's counts once they show the release, have been stable for a second, or time is up.

        ``is_release_unknown``: the released bytes are unknown.
        """
        released: dict[str, int] = {}
        for change in changes:
            device = change.before.device_uuid
            released[device] = released.get(device, 0) + change.before.held_bytes - change.after.held_bytes
        began = changed_at = self._clock()
        counts, pause = await self._driver_counts(identity), 0.02
        while is_release_unknown or any(
            before.used_bytes[device] - counts.used_bytes[device] < released_bytes
            for device, released_bytes in released.items()
            if device in before.used_bytes and device in counts.used_bytes
        ):
            now = self._clock()
            if now - began > self._settle_seconds or now - changed_at > STABLE_SECONDS:
                break
            await asyncio.sleep(pause)
            pause = min(0.2, pause * 1.5)
            latest = await self._driver_counts(identity)
            changed_at = self._clock() if latest != counts else changed_at
            counts = latest
        return counts

    async def _driver_counts(self, identity: PeerIdentity) -> DriverCounts:
        reading = await self._read_driver()
        devices = reading.devices if reading else ()
        usages = ((device.uuid, device.processes_by_key.get(identity.process)) for device in devices)
        used = {uuid: process.used_bytes for uuid, process in usages if process and process.used_bytes is not None}
        return DriverCounts(used, {device.uuid: device.size_bytes for device in devices if device.size_bytes})


def _cooldown_message(report: AgentReport, elapsed_seconds: float, wait_seconds: float) -> str:
    name = report.workload or f"pid {report.process.pid}"
    when = f"in {math.ceil(wait_seconds)} s, or now {API_FORCE_HINT}"
    return f"{name} was flushed {int(elapsed_seconds)} s ago; try again {when}"


log = logging.getLogger(__name__)

MAX_AUDITED_PIDS = 100
"""Maximum number of pids that the audit entry of a flush names."""


class FlushPart(Part, FlushService):
    table = "receipts"

    def __init__(self, core: Core) -> None:
        self._core, self._store = core, core.store
        self.flusher = Flusher(
            core.programs,
            core.read_driver,
            on_receipt=core.add_receipt,
            cooldown_seconds=core.settings.flush_cooldown,
            engine_step=core.find(EngineStep),
            store_receipt=self._store_engine_receipt,
        )
        self.hook = AlertmanagerHook(
            self.flush, core.store, core.machine_names, lambda: core.settings.alertmanager_dry_run
        )
        self.loaded = False
        core.provide(FlushService, self)
        core.provide(AlertmanagerHook, self.hook)
        core.provide(FlushPart, self)

    async def load(self) -> Sequence[str]:
        await self.hook.restore()
        self.flusher.receipts.extend(await self._store.receipts())
        self.loaded = True
        return ()

    def start(self) -> None:
        self.flusher.resume_engine_restorations()

    async def configure(self, settings: Settings) -> None:
        self.flusher.cooldown_seconds = settings.flush_cooldown

    async def close(self) -> None:
        await self.flusher.close()

    def receipts(self) -> Sequence[Receipt]:
        return tuple(self.flusher.receipts)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        """Flush, with an audit entry before and after. Raises FlushError, StoreUnavailable."""
        kind = "plan" if request.dry_run else "forced flush" if request.force else "flush"
        caller = f"{requested_by} for {request.requested_for}" if request.requested_for else requested_by
        description = f"{kind} of {request.target}, steps {','.join(request.steps)}, by {caller}"
        note = self._core.audit_change if not request.dry_run else _ignore_note
        operation_detail = {"operation": request.operation.id} if request.operation else {}
        if not request.dry_run:
            await self._store.audit(requested_by, "flush.request", _request_detail(request))
        try:
            outcome = await self.flusher.flush(request, requested_by)
        except FlushError as error:
            log.info("%s: refused: %s", description, error)
            await note(requested_by, "flush.refused", {"problem": str(error), **operation_detail})
            raise
        except asyncio.CancelledError:
            log.info("%s: interrupted, because the daemon is stopping", description)
            reason = f"the daemon stopped before the flush of {request.target} ended"
            await note(requested_by, "flush.interrupted", {"problem": reason, **operation_detail})
            raise
        counts = Counter(receipt.outcome for receipt in outcome.receipts)
        results = ", ".join(f"{count} {name}" for name, count in counts.items())
        released_text = "" if request.dry_run else f"; {size_text(outcome.released_bytes)} released"
        log.info("%s: %s%s", description, results, released_text)
        await note(requested_by, "flush.receipts", _receipts_detail(outcome) | operation_detail, outcome.receipts)
        self._core.dependencies.tick_due.set()  # the next frame shows the effect of the flush
        return outcome

    async def _store_engine_receipt(self, receipt: Receipt) -> None:
        """Store the receipt of an engine that was returned to service. The store has logged it if it cannot."""
        with suppress(StoreUnavailable):
            detail = {"engine": receipt.workload, "outcome": receipt.outcome, "reason": receipt.reason}
            await self._store.audit(receipt.requested_by, "engine.returned", detail)
            await self._store.add_receipts([receipt])


async def _ignore_note(actor: str, action: str, detail: Any, receipts: Sequence[Receipt] = ()) -> None:
    """Note nothing about a plan, which changes nothing."""


def _request_detail(request: FlushRequest) -> dict[str, Any]:
    """Return the audit's detail of a request: its flags, and the texts that are not empty."""
    operation = request.operation
    optional = {"force": request.force, "wake": request.wake, "for": request.requested_for}
    if operation is not None:
        optional |= {"operation": operation.id, "reason": operation.reason, "by": operation.by}
    return {
        "target": str(request.target),
        "steps": request.steps,
        **{name: value for name, value in optional.items() if value},
    }


def _receipts_detail(outcome: FlushResponse) -> dict[str, Any]:
    """Return the audit's detail of a flush: totals, and the SHA-256 of the receipts as the store keeps them, one a
    line."""
    text = "".join(f"{to_text(receipt)}\n" for receipt in outcome.receipts)
    return {
        "id": outcome.id,
        "released_bytes": outcome.released_bytes,
        "receipts": len(outcome.receipts),
        "outcomes": dict(Counter(receipt.outcome for receipt in outcome.receipts)),
        "pids": sorted({receipt.pid for receipt in outcome.receipts})[:MAX_AUDITED_PIDS],
        "sha256": sha256(text.encode()).hexdigest(),
    }
