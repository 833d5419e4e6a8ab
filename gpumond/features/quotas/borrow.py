"""Room for a program whose allocation has failed: which caches are flushed for it, and the request that carries it out.

`borrow_plan` decides, without I/O: the borrower's own programs first, other users' only where ``reclaim`` is ``all``,
none within its reserve, none that has just been flushed, and none that allocated the released memory again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from gpumond.facts.errors import FlushError, StoreUnavailable
from gpumond.facts.flush import FlushRequest, FlushResponse, Target
from gpumond.facts.messages import BorrowRequest, BorrowResponse
from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import ReclaimPolicy
from gpumond.facts.snapshot import DeviceReading, Reading, Snapshot
from gpumond.facts.units import HOUR_SECONDS, MIB, size_text
from gpumond.features.quotas.admissions import AdmissionPlan, DeviceCapacity, Neighbor, reclaim_plan
from gpumond.host.peer import PeerIdentity, person_uid
from gpumond.host.tasks import Tasks
from gpumond.serve.limits import TokenBucket

RESPONSE_TIMEOUT_SECONDS = 1.8
"""Time for an answer, flushes included. The agent waits for two seconds."""
READ_TIMEOUT_SECONDS = 0.5
SLACK_BYTES = 20 * MIB
"""An allocator takes memory in segments of up to this size, and PyTorch states its request with two decimals."""
MAX_REQUESTS_PER_HOUR = 120
"""Requests of one user that may flush programs."""
COOLDOWN_SECONDS, REFILL_COOLDOWN_SECONDS = 6.0, 600.0
"""Time in which a program is not flushed again; the second if it allocated the released memory again."""
MIN_ENGINE_IDLE_SECONDS = 60.0
"""Time without a request from which a serving engine may release its memory."""


@dataclass(frozen=True, slots=True)
class EarlierFlush:
    """A flush for a borrower: when, and the program's refilled flushes before it."""

    at: float
    refilled_flushes: int


def is_cooling_down(neighbor: Neighbor, earlier_flushes: Mapping[ProcessKey, EarlierFlush], now: float) -> bool:
    """Return True if a program may not be flushed again yet."""
    earlier = earlier_flushes.get(neighbor.process)
    if earlier is None:
        return False
    return now - earlier.at < (
        REFILL_COOLDOWN_SECONDS if neighbor.refilled_flushes > earlier.refilled_flushes else COOLDOWN_SECONDS
    )


def borrow_plan(
    capacity: DeviceCapacity,
    available_bytes: int | None,
    borrower: PeerIdentity,
    size_bytes: int,
    reclaim: ReclaimPolicy,
    earlier_flushes: Mapping[ProcessKey, EarlierFlush] = {},
    now: float = 0.0,
) -> AdmissionPlan:
    """Return the plan for a request of ``size_bytes``. If bytes are missing even after its flushes, none is due."""
    need_bytes = size_bytes + SLACK_BYTES
    if available_bytes is None or need_bytes <= available_bytes:
        return AdmissionPlan(available_bytes)
    allowed = [
        replace(each, suspendable_bytes=0)  # a failed call can't wait for a suspension
        for each in capacity.neighbors
        if each.process != borrower.process
        and (each.uid == borrower.uid or reclaim == "all")
        and not is_cooling_down(each, earlier_flushes, now)
    ]
    missing_bytes = need_bytes - available_bytes
    own_plan = reclaim_plan((each for each in allowed if each.uid == borrower.uid), missing_bytes, available_bytes)
    return (
        own_plan
        if not own_plan.missing_bytes
        else reclaim_plan(allowed, missing_bytes, available_bytes, first_uid=borrower.uid)
    )


def idle_engines(
    snapshot: Snapshot, device_uuid: str, borrower: PeerIdentity, reclaim: ReclaimPolicy, missing_bytes: int
) -> list[str]:
    """Return the declared serving engines whose release returns ``missing_bytes``, the largest first; else none."""
    sizes: list[tuple[int, str]] = []
    for engine in snapshot.engines:
        is_idle = engine.idle_seconds is not None and engine.idle_seconds >= MIN_ENGINE_IDLE_SECONDS
        is_allowed = reclaim == "all" or (reclaim == "user" and engine.uid == borrower.uid)
        is_own = borrower.process in [process.key for process in engine.processes]
        if is_allowed and is_idle and not is_own and engine.methods and engine.up and not engine.sleeping:
            sizes += [
                (size, engine.name) for device, size in snapshot.used_by_engine(engine) if device.uuid == device_uuid
            ]
    names: list[str] = []
    for size, name in sorted(sizes, reverse=True):
        if missing_bytes > 0:
            names.append(name)
            missing_bytes -= size
    return names if missing_bytes <= 0 else []


CapacityOf = Callable[[Snapshot, DeviceReading, ProcessKey], "tuple[DeviceCapacity, int | None]"]


class Borrows:
    """Answers the requests of agents.

    ``snapshot`` and ``reclaim`` return the current ones, ``capacity_of`` a device's capacity, with the bytes of it that
    are available to a process.
    """

    def __init__(
        self,
        flush: Callable[[FlushRequest, str], Awaitable[FlushResponse]],
        snapshot: Callable[[], Snapshot | None],
        capacity_of: CapacityOf,
        read_driver: Callable[[], Awaitable[Reading | None]],
        reclaim: Callable[[], ReclaimPolicy],
        clock: Callable[[], float],
    ) -> None:
        self._flush, self._snapshot, self._capacity_of, self._read_driver = flush, snapshot, capacity_of, read_driver
        self._reclaim, self._clock = reclaim, clock
        self._flushed: dict[ProcessKey, EarlierFlush] = {}
        self._rate = TokenBucket(MAX_REQUESTS_PER_HOUR, HOUR_SECONDS)
        self._tasks = Tasks()

    async def borrow(self, borrower: PeerIdentity, request: BorrowRequest) -> BorrowResponse:
        """Make room for a request, and answer within ``RESPONSE_TIMEOUT_SECONDS``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RESPONSE_TIMEOUT_SECONDS
        snapshot = self._snapshot()
        uuid = request.device_uuid or (_only_device(snapshot, borrower) if snapshot else "")
        device = await self._device(snapshot, uuid)
        if snapshot is None or device is None:
            return BorrowResponse(request.id, False, reason="the device is unknown to the daemon")
        capacity, available_bytes = self._capacity_of(snapshot, device, borrower.process)
        now, reclaim = self._clock(), self._reclaim()
        plan = borrow_plan(capacity, available_bytes, borrower, request.size_bytes, reclaim, self._flushed, now)
        if plan.fits:
            return BorrowResponse(request.id, True)
        engines = idle_engines(snapshot, device.uuid, borrower, reclaim, plan.missing_bytes)
        if plan.missing_bytes and not engines:
            return BorrowResponse(
                request.id, False, reason=f"{size_text(plan.missing_bytes)} is missing even after the allowed flushes"
            )
        user = str(person_uid(borrower.uid))
        if not (plan.flushes or engines) or self._rate.wait_seconds(user, now) > 0:
            reason = "too many requests in an hour" if plan.flushes or engines else "the free memory is unknown"
            return BorrowResponse(request.id, False, reason=reason)
        self._rate.spend(user, now)
        tasks = self._start(plan, engines, f"uid:{borrower.uid}", now)
        done, pending = await asyncio.wait(tasks, timeout=max(0.0, deadline - loop.time()))
        released = sum(task.result().released_bytes for task in done if task.exception() is None)
        missing_bytes = request.size_bytes - (available_bytes or 0)
        reason = "a flush is still in progress" if pending else "" if released >= missing_bytes else "less was released"
        return BorrowResponse(request.id, released >= missing_bytes, max(0, released), reason)

    async def close(self) -> None:
        await self._tasks.cancel()

    def _start(
        self, plan: AdmissionPlan, engines: list[str], actor: str, now: float
    ) -> list[asyncio.Task[FlushResponse]]:
        """Start the flushes. They continue if the answer does not wait for them."""
        self._flushed = {key: each for key, each in self._flushed.items() if now - each.at < REFILL_COOLDOWN_SECONDS}
        for each in plan.flushes:
            self._flushed[each.process] = EarlierFlush(now, each.refilled_flushes)
        targets = [
            (Target(pid=each.process.pid, start_ticks=each.process.start_ticks), DEFAULT_STEPS) for each in plan.flushes
        ]
        targets += [(Target(workload=name), (ENGINE_STEP,)) for name in engines]
        return [
            self._tasks.start(_outcome_or_empty(self._flush(FlushRequest(target=target, steps=steps), actor)))
            for target, steps in targets
        ]

    async def _device(self, snapshot: Snapshot | None, uuid: str) -> DeviceReading | None:
        """Return a new reading of the device: since the last tick, the borrower may have filled it."""
        read = self._tasks.start(self._read_driver())
        done, _ = await asyncio.wait({read}, timeout=READ_TIMEOUT_SECONDS)
        reading = read.result() if done else None
        latest = next((each for each in reading.devices if each.uuid == uuid), None) if reading else None
        return latest or (snapshot.device(uuid) if snapshot else None)


async def _outcome_or_empty(flush: Awaitable[FlushResponse]) -> FlushResponse:
    """Return the outcome, an empty one if the flush could not start."""
    try:
        return await flush
    except (FlushError, StoreUnavailable):
        return FlushResponse("", (), 0)


def _only_device(snapshot: Snapshot, borrower: PeerIdentity) -> str:
    report = snapshot.reports_by_process.get(borrower.process)
    uuids = {pool.device_uuid for pool in report.pools} if report else set()
    return uuids.pop() if len(uuids) == 1 else ""
