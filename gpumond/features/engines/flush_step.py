"""The flush step ``engine``: a declared serving engine releases its memory on request, and the driver proves it.

The engine's answer is not the proof: most engines answer before anything is free, and some if nothing will be. The
receipt states what the driver counts for the engine's processes before and after. Nothing is sent unless all checks
pass, and no release is repeated after a timeout. A release that takes the server out of service and returns nothing is
undone until the server serves.

Memory, checks and receipts come first, without I/O; `EngineFlusher` carries a flush out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gpumond.config.settings import Settings
from gpumond.core import Core, EngineStep, Part
from gpumond.facts.engines import EngineReading, EngineState
from gpumond.facts.errors import EngineError, EngineRejected, EngineTimeout
from gpumond.facts.flush import FlushRequest, receipt_without_bytes
from gpumond.facts.pools import ENGINE_STEP, ExpectedRelease, FlushOutcome, PoolBytes, Receipt, StepResult
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import ProcessUsage, Reading, Snapshot
from gpumond.facts.units import plural, size_text
from gpumond.features.engines.poller import Engines
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import ReleaseMethod
from gpumond.host.machine import read_process_stat
from gpumond.host.tasks import cancel_all

log = logging.getLogger(__name__)

MARGIN_BYTES = 1 << 30
"""Memory of the host or device that must remain free."""

TOLERANCE_BYTES = 1 << 20
FREED_RATIO = 0.9
"""The part of the likely bytes from which a release is complete."""
USEFUL_RATIO = 0.05
"""The part of an engine's memory below which a release is not worth a server that does not serve."""

FAILED_SETTLE_SECONDS = 5.0
WAKE_TIMEOUT_SECONDS = 300.0
"""Limit of a wake, which may load a model from disk."""

ENDED_STATES = ("Z", "X")
KV_CACHE = "kv_cache"
"""The method that drops what no other method moves to the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Processes of an engine, and the driver's count of their bytes by device. ``uid``: the user of the listeners.

    ``use_ratio``: the driver's utilization of a device by the busiest of the processes; None if it is unknown.
    """

    listeners: frozenset[ProcessKey] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    used: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    uid: int | None = None
    use_ratio: float | None = None
    problem: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.used.values())

    def covers(self, other: EngineMemory) -> bool:
        """Return False if the driver has not answered for a device on which the other counts memory."""
        return other.used.keys() <= self.used.keys()

    @property
    def listener(self) -> ProcessKey:
        """The process that names the engine in receipts; the oldest, if several share the socket."""
        return min(self.listeners, key=lambda key: (key.start_ticks or 0, key.pid), default=ProcessKey(0, None))


def utilization_of(processes: Iterable[ProcessUsage]) -> float | None:
    """Return the utilization of a device by the busiest of the processes; None if that of an idle one is unknown."""
    ratios = [process.utilization_ratio for process in processes]
    known_ratios = [ratio for ratio in ratios if ratio is not None]
    return max(known_ratios) if known_ratios and (any(known_ratios) or len(known_ratios) == len(ratios)) else None


def obstacle(method: ReleaseMethod, states: Sequence[EngineState], use_ratios: Sequence[float | None]) -> str:
    """Return the reason why the engine is not idle in consecutive states; empty if it is.

    ``use_ratios``: the driver's utilization of a device by its processes in the meantime. An engine that does not state
    its requests is idle only if the driver states that its processes are; one that completes them, and that serves on
    after the release, needs neither.
    """
    latest = states[-1]
    if latest.obstacle:
        return latest.obstacle
    if latest.requests:
        return f"{plural(latest.running or 0, 'request')} running, {latest.waiting or 0} queued"
    if any(before.work != after.work for before, after in pairwise(states)):
        return "the engine served a request during the check"
    if busiest := max((ratio for ratio in use_ratios if ratio), default=0.0):
        return f"the engine's processes use the GPU ({busiest:.0%}): a request may be running"
    if latest.requests is None and None in use_ratios and (method.stops_service or not method.waits):
        reason = f" ({latest.no_counts_reason})" if latest.no_counts_reason else ""
        return (
            f"can't tell whether requests are running: the engine doesn't report them{reason}, and the driver doesn't "
            "report its GPU use"
        )
    return ""


def host_obstacle(method: ReleaseMethod, moved_bytes: int, available_bytes: int | None) -> str:
    """Return the reason why the ``moved_bytes`` may not fit into the host's memory; empty if they do."""
    if not method.moves_to_host:
        return ""
    if available_bytes is None:
        return "the engine's memory would move to the host, whose free memory is unknown"
    if available_bytes < moved_bytes + MARGIN_BYTES:
        return (
            f"up to {size_text(moved_bytes)} moves to the host, where {size_text(available_bytes)} is available; "
            f"{size_text(MARGIN_BYTES)} must remain free"
        )
    return ""


def outcome_of(
    method: ReleaseMethod,
    expected: ExpectedRelease,
    before: EngineMemory,
    after: EngineMemory,
    ended: frozenset[ProcessKey],
    error: EngineError | None,
) -> tuple[FlushOutcome, str]:
    """Return outcome and reason of a release. The driver's count decides, and never the engine's answer alone."""
    released_bytes, ended_processes = before.total_bytes - after.total_bytes, ended & before.processes
    if before.listeners <= ended:
        return "failed", "the server exited after the call; see its log"
    if not after.covers(before):
        return "timeout", "the driver doesn't respond, so the release isn't confirmed"
    if isinstance(error, EngineTimeout):
        return "timeout", f"{error}; the call may still be in progress, so gpumond doesn't repeat it"
    if ended_processes and not method.ends_process:
        pids = ", ".join(str(key.pid) for key in sorted(ended_processes))
        return "failed", f"pid {pids} of the engine exited after the call; see the engine's log"
    if error is not None and released_bytes <= TOLERANCE_BYTES:
        return ("refused" if isinstance(error, EngineRejected) else "failed"), str(error)
    if released_bytes <= TOLERANCE_BYTES:
        increase = f", {size_text(-released_bytes)} more than before" if released_bytes < -TOLERANCE_BYTES else ""
        return "nothing", f"the engine responded, but the driver still counts {size_text(after.total_bytes)}{increase}"
    min_bytes = max(FREED_RATIO * (expected.likely or 0), USEFUL_RATIO * before.total_bytes)
    if error is not None or released_bytes < min_bytes:
        expected_text = f"at most {size_text(expected.high)}" if expected.likely is None else size_text(expected.likely)
        return "partial", join_reasons(
            error, f"released {size_text(released_bytes)} of the expected {expected_text} (driver-reported)"
        )
    return ("gone" if ended_processes else "freed"), ""


def join_reasons(*parts: object) -> str:
    return "; ".join(str(part) for part in parts if part)


def last_release_receipts(receipts: Iterable[Receipt], name: str) -> tuple[Receipt, ...]:
    """Return the receipts of the last release that was sent to this engine, oldest first; none if it has been undone
    since.

    Whatever the outcome, the server may have less memory than before, or be paused.
    """
    latest: list[Receipt] = []
    for receipt in receipts:
        if receipt.workload != name or receipt.method is None:
            continue
        if receipt.outcome == "woken":
            latest = []
        elif any(step.step == ENGINE_STEP for step in receipt.steps):
            latest = [each for each in latest if each.started_at == receipt.started_at] + [receipt]
    return tuple(latest)


def has_released_too_little(receipts: Sequence[Receipt]) -> bool:
    """Return True if a release has returned too little to keep a server out of service for it."""
    if all(receipt.outcome in ("freed", "partial", "gone") for receipt in receipts):
        used_before = sum((receipt.before.driver_used_bytes or 0) if receipt.before else 0 for receipt in receipts)
        return sum(receipt.released_bytes for receipt in receipts) < USEFUL_RATIO * used_before
    return bool(receipts)


def unreturned_bytes(receipts: Iterable[Receipt], memory: EngineMemory) -> dict[str, int]:
    """Return, by device, the bytes that the driver counts less for an engine than before its release."""
    return {
        receipt.device_uuid: max(0, (receipt.before.driver_used_bytes or 0) - memory.used.get(receipt.device_uuid, 0))
        for receipt in receipts
        if receipt.device_uuid is not None and receipt.before is not None
    }


def shortage_reason(needed: Mapping[str, int], free: Mapping[str, int]) -> str:
    """Return the reason why missing memory does not fit on its devices anymore; empty if it does."""
    for uuid, size in needed.items():
        available = free.get(uuid)
        if size > TOLERANCE_BYTES and (available is None or available < size + MARGIN_BYTES):
            free_text = "an unknown amount" if available is None else size_text(available)
            return f"the engine needs {size_text(size + MARGIN_BYTES)} on device {uuid}, where {free_text} is free"
    return ""


def last_released_bytes(receipts: Iterable[Receipt], name: str, method: str) -> int:
    """Return the bytes of the last complete release of this engine with this method; 0 without one."""
    sizes: dict[float, int] = {}
    for receipt in receipts:
        if (receipt.workload, receipt.method, receipt.outcome) == (name, method, "freed"):
            sizes[receipt.started_at] = sizes.get(receipt.started_at, 0) + receipt.released_bytes
    return next(reversed(sizes.values()), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTiming:
    """``reads`` are spread over ``idle_seconds``. ``settle_seconds`` limits each method's own time. A server is
    returned to service after the pauses ``restore_pause_seconds``, the last of which is repeated.
    """

    reads: int = 3
    idle_seconds: float = 10.0
    poll_seconds: float = 0.25
    stable_seconds: float = 1.0
    settle_seconds: float = 60.0
    restore_pause_seconds: tuple[float, ...] = (2.0, 5.0, 10.0)


class ReleaseRefused(Exception):
    """A check failed; nothing was sent. ``outcome`` is ``nothing`` if there is nothing to release."""

    def __init__(self, reason: str, outcome: FlushOutcome = "refused") -> None:
        super().__init__(reason)
        self.outcome = outcome


def refuse_if(reason: str) -> None:
    if reason:
        raise ReleaseRefused(reason)


@dataclass(kw_only=True)
class _EngineFlush:
    """One flush, whose parts become known one after the other, and its receipts."""

    engine: EngineConfig
    requested_by: str
    method: ReleaseMethod | None = None
    before: EngineMemory = EngineMemory()
    expected: ExpectedRelease | None = None
    models: tuple[str, ...] = ()
    wake_seconds: float | None = None
    started_at: float = field(default_factory=time.time)

    def receipt(self, outcome: FlushOutcome, reason: str) -> Receipt:
        """Return a receipt without bytes."""
        name, requested_by, method = self.engine.name, self.requested_by, self.method
        return replace(
            receipt_without_bytes(self.before.listener, name, outcome, reason, requested_by, self.started_at),
            allocator=self.engine.kind,
            method=method.name if method else None,
            models=self.models,
            wake=method.wake_hint.replace("NAME", name) if method else "",
            wake_seconds=self.wake_seconds,
        )

    def wake_receipt(
        self, outcome: FlushOutcome, returned_bytes: int, needed_bytes: int, duration_seconds: float
    ) -> Receipt:
        """Return the receipt of a wake, after which the driver counts ``returned_bytes`` of ``needed_bytes`` again."""
        returned = size_text(max(0, returned_bytes))
        receipt = self.receipt(
            outcome, f"{returned} of the released {size_text(needed_bytes)} is back on the GPU (driver-reported)"
        )
        step = StepResult("wake", 0, duration_seconds, receipt.method or "")
        return replace(receipt, steps=(step,), duration_seconds=duration_seconds)

    def receipts(
        self, after: EngineMemory | None, outcome: FlushOutcome, reason: str, duration_seconds: float = 0
    ) -> list[Receipt]:
        """Return one receipt for each device; ``after`` is None for a plan."""
        base, receipts = self.receipt(outcome, reason), []
        for uuid, used_before in sorted(self.before.used.items()):
            expected = self._device_estimate(used_before) if self.expected else None
            likely = expected.likely if expected else None
            live = None if likely is None else used_before - likely
            used_after = after.used.get(uuid) if after else None
            driver_released = None if used_after is None else used_before - used_after
            released = max(0, driver_released or 0)
            receipt = replace(
                base,
                device_uuid=uuid,
                expected=expected,
                released_bytes=released,
                driver_released_bytes=driver_released,
                before=PoolBytes(used_before, live, likely, used_before),
                after=None if used_after is None else PoolBytes(used_after, used_after, 0, used_after),
                steps=(StepResult(ENGINE_STEP, released, duration_seconds, base.method or ""),) if after else (),
            )
            receipts.append(receipt)
        return receipts

    def _device_estimate(self, used: int) -> ExpectedRelease:
        """Return the estimate for one device, in proportion to its part of the engine's memory."""
        assert self.expected is not None
        total, expected = max(1, self.before.total_bytes), self.expected
        likely = None if expected.likely is None else expected.likely * used // total
        return ExpectedRelease(expected.low * used // total, likely, expected.high * used // total, expected.exactness)


class EngineFlusher(EngineStep):
    """Executor of the step, one release at a time for each engine and for each tree of processes."""

    def __init__(
        self,
        engines: Engines,
        read_driver: Callable[[], Awaitable[Reading | None]],
        timing: ReleaseTiming = ReleaseTiming(),
    ) -> None:
        self.engines, self._read_driver, self._timing = engines, read_driver, timing
        self._receipts: Callable[[], Iterable[Receipt]] = tuple
        self._record_receipt: Callable[[Receipt], Awaitable[None]] | None = None
        self._under_way: dict[str, frozenset[ProcessKey]] = {}
        self._unanswered: dict[str, frozenset[ProcessKey]] = {}
        """By name: the listeners of an engine that did not answer its last release in time."""
        self._restorations: dict[str, asyncio.Task[None]] = {}
        """By name: the return to service of an engine that does not serve yet."""

    def readings(self) -> Sequence[EngineReading]:
        return self.engines.readings()

    def use_receipts(
        self, receipts: Callable[[], Iterable[Receipt]], record_receipt: Callable[[Receipt], Awaitable[None]]
    ) -> None:
        self._receipts, self._record_receipt = receipts, record_receipt

    def resume_restorations(self) -> None:
        """Continue to return servers to service, as the previous daemon did."""
        for reading in self.engines.readings():
            release_receipts = last_release_receipts(self._receipts(), reading.name)
            if has_released_too_little(release_receipts):
                self._start_restoration(reading.name, release_receipts)

    async def close(self) -> None:
        await cancel_all(self._restorations.values())

    async def flush(self, name: str, request: FlushRequest, requested_by: str) -> list[Receipt]:
        """Release the memory of one engine, or undo the last release, and return a receipt for each device.

        A method that takes longer than ``timeout_seconds`` has its own limit. With ``target.uid``, the engine's
        listener must belong to this user.
        """
        began, engine = time.monotonic(), self.engines.declaration(name)
        if engine is None:
            reason = f"no engine {name} is configured"
            return [receipt_without_bytes(ProcessKey(0, None), name, "refused", reason, requested_by, time.time())]
        wakes = [each.duration_seconds for each in self._receipts() if (each.workload, each.outcome) == (name, "woken")]
        flush = _EngineFlush(engine=engine, requested_by=requested_by, wake_seconds=wakes[-1] if wakes else None)
        try:
            flush.method = method = _allowed_method(engine)
            flush.before = await self._read_memory(name)
            refuse_if(flush.before.problem or _user_mismatch(request, flush.before))
            with self._exclude_others(flush, request):
                receipts = await (self._wake if request.wake else self._release)(flush, method, request)
        except ReleaseRefused as refusal:
            receipts = [flush.receipt(refusal.outcome, str(refusal))]
        except EngineError as error:
            receipts = [flush.receipt("refused", str(error))]
        return [replace(receipt, duration_seconds=time.monotonic() - began) for receipt in receipts]

    @contextmanager
    def _exclude_others(self, flush: _EngineFlush, request: FlushRequest) -> Iterator[None]:
        """Exclude other flushes of the engine and of its processes. Raises Refused."""
        name, processes = flush.engine.name, flush.before.listeners | flush.before.processes
        if request.dry_run:
            yield
            return
        if name in self._under_way or any(processes & other for other in self._under_way.values()):
            raise ReleaseRefused("another flush is in progress; wait for its receipt")
        if name in self._restorations and not request.wake:
            raise ReleaseRefused("gpumond is still returning the engine to service after the last release")
        if self._unanswered.get(name) == flush.before.listeners and not (request.force or request.wake):
            raise ReleaseRefused(
                "the last release got no response, and may still be running; check the engine's state, then use --force"
            )
        self._unanswered.pop(name, None)
        self._under_way[name] = processes
        try:
            yield
        finally:
            del self._under_way[name]

    async def _release(self, flush: _EngineFlush, method: ReleaseMethod, request: FlushRequest) -> list[Receipt]:
        engine, name = flush.engine, flush.engine.name
        # Is there something to release?
        if not flush.before.processes:
            raise ReleaseRefused(
                "the engine has no process on a GPU: either no model is loaded, or a proxy listens at the address"
            )
        state = await self.engines.read(name)
        if state.sleeping and not method.ends_process:  # a process that sleeps keeps its context
            raise ReleaseRefused("the engine is already sleeping", "nothing")
        if state.paused:
            raise ReleaseRefused("the engine is paused, but not by gpumond: resume it first")
        if not flush.before.total_bytes:
            raise ReleaseRefused("the driver counts no memory for the engine", "nothing")
        flush.expected = expected = self._expected(flush, method, state)
        if expected.high < request.min_reclaimable_bytes:
            minimum = size_text(request.min_reclaimable_bytes)
            raise ReleaseRefused(
                f"only {size_text(expected.high)} is reclaimable, less than the requested minimum of {minimum}",
                "nothing",
            )

        # Can it be released now?
        states, use_ratios = [state], [flush.before.use_ratio]
        refuse_if(obstacle(method, states, use_ratios))
        if method.check is not None:
            refuse_if(await self.engines.carry_out(name, method.check(engine, state), method.call_seconds))
        kv_cache_bytes = last_released_bytes(self._receipts(), name, KV_CACHE)
        available_bytes = await self.engines.available_host_bytes(flush.before.processes)
        refuse_if(host_obstacle(method, max(0, expected.high - kv_cache_bytes), available_bytes))
        if request.dry_run:
            return flush.receipts(None, "planned", "")

        # Does it remain idle?
        for _ in range(self._timing.reads - 1):
            await asyncio.sleep(self._timing.idle_seconds / (self._timing.reads - 1))
            latest = await self._read_memory(name)
            if latest.listeners != flush.before.listeners:
                raise ReleaseRefused(latest.problem or "the engine's server was replaced during the check")
            refuse_if(_user_mismatch(request, latest))
            flush.before = latest
            use_ratios.append(latest.use_ratio)
            states.append(await self.engines.read(name))
            refuse_if(obstacle(method, states, use_ratios))

        # Release, and let the driver count.
        began, error = time.monotonic(), None
        try:
            limit_seconds = max(method.call_seconds, request.timeout_seconds)
            flush.models = await self.engines.carry_out(name, method.release(engine, states[-1]), limit_seconds)
        except EngineError as failure:
            error = failure
        after = await self._await_settled(flush, method, expected, error)
        outcome, reason = outcome_of(method, expected, flush.before, after, self._ended_processes(flush.before), error)
        if outcome == "timeout" or isinstance(error, EngineTimeout):
            self._unanswered[name] = flush.before.listeners
        receipts = flush.receipts(after, outcome, reason, time.monotonic() - began)
        if method.stops_service and method.undo and engine.wake and has_released_too_little(receipts):
            self._start_restoration(name, receipts)
            receipts = [
                replace(each, reason=join_reasons(each.reason, "gpumond is returning the engine to service"))
                for each in receipts
            ]
        return receipts

    def _expected(self, flush: _EngineFlush, method: ReleaseMethod, state: EngineState) -> ExpectedRelease:
        expected = method.expected(flush.engine, state, flush.before.total_bytes)
        if expected.likely is not None:
            return expected
        last_bytes = last_released_bytes(self._receipts(), flush.engine.name, method.name)
        return replace(expected, likely=min(expected.high, last_bytes) if last_bytes else None)

    async def _await_settled(
        self, flush: _EngineFlush, method: ReleaseMethod, expected: ExpectedRelease, error: EngineError | None
    ) -> EngineMemory:
        """Return the memory once the driver counts the release and two reads are equal, or time is up."""
        name, before = flush.engine.name, flush.before
        limit_seconds = min(method.settle_seconds, self._timing.settle_seconds)
        limit_seconds = min(limit_seconds, FAILED_SETTLE_SECONDS) if error else limit_seconds
        expected_bytes = max(TOLERANCE_BYTES + 1, FREED_RATIO * (expected.likely or 0))
        began = changed_at = time.monotonic()
        latest = await self._read_memory(name, before)
        while time.monotonic() < began + limit_seconds:
            is_stable = time.monotonic() - changed_at >= self._timing.stable_seconds
            if is_stable and latest.covers(before) and before.total_bytes - latest.total_bytes >= expected_bytes:
                break
            if before.listeners <= self._ended_processes(before) and not latest.total_bytes:
                break
            await asyncio.sleep(self._timing.poll_seconds)
            memory = await self._read_memory(name, before)
            changed_at = changed_at if memory.used == latest.used else time.monotonic()
            latest = memory
        return latest

    async def _wake(self, flush: _EngineFlush, allowed_method: ReleaseMethod, request: FlushRequest) -> list[Receipt]:
        engine, before = flush.engine, flush.before
        # Is there a release to undo, and does its memory fit?
        release_receipts = last_release_receipts(self._receipts(), engine.name)
        method = _method_of(engine, release_receipts) or allowed_method if release_receipts else allowed_method
        was_rejected = all(receipt.outcome == "refused" for receipt in release_receipts) and not method.stops_service
        if not release_receipts or was_rejected or _listener_of(release_receipts) != before.listener:
            raise ReleaseRefused("nothing to wake: everything that gpumond released is already back", "nothing")
        if not engine.wake:
            raise ReleaseRefused("the configuration has wake: false for this engine")
        if method.undo is None:
            raise ReleaseRefused(f"the engine can't be woken: {method.wake_hint}")
        needed_by_device = unreturned_bytes(release_receipts, before)
        refuse_if(shortage_reason(needed_by_device, before.free))
        needed_bytes = sum(needed_by_device.values())
        flush.method, flush.models = method, release_receipts[0].models
        if request.dry_run:
            return [flush.receipt("planned", f"the engine would need {size_text(needed_bytes)} again")]

        # Undo it; the return to service repeats a failure.
        if task := self._restorations.get(engine.name):
            await cancel_all([task])
        began, failure = time.monotonic(), None
        try:
            await self._undo(engine, method, release_receipts, max(WAKE_TIMEOUT_SECONDS, request.timeout_seconds))
        except EngineError as error:
            failure = error
        if await self._server_ended(before, failure):
            return [flush.receipt("failed", "the server exited after the call; see its log")]
        if failure is not None:
            outcome: FlushOutcome = "timeout" if isinstance(failure, EngineTimeout) else "failed"
            note = "the call may still be in progress" if outcome == "timeout" else ""
            if method.stops_service:
                self._start_restoration(engine.name, release_receipts)
                note = "gpumond repeats the request until the engine serves"
            return [flush.receipt(outcome, join_reasons(failure, note))]

        # Let the driver count.
        end = time.monotonic() + min(method.settle_seconds, self._timing.settle_seconds)
        returned_bytes = (await self._read_memory(engine.name)).total_bytes - before.total_bytes
        while returned_bytes < FREED_RATIO * needed_bytes and time.monotonic() < end:
            await asyncio.sleep(self._timing.poll_seconds)
            returned_bytes = (await self._read_memory(engine.name)).total_bytes - before.total_bytes
        outcome = "woken" if returned_bytes >= FREED_RATIO * needed_bytes or method.stops_service else "nothing"
        return [flush.wake_receipt(outcome, returned_bytes, needed_bytes, time.monotonic() - began)]

    async def _server_ended(self, before: EngineMemory, problem: EngineError | None) -> bool:
        """Return whether the server has ended. The kernel closes a process's connections before it reports the end."""
        may_have_ended = problem is not None and not isinstance(problem, (EngineRejected, EngineTimeout))
        end = time.monotonic() + (min(self._timing.settle_seconds, FAILED_SETTLE_SECONDS) if may_have_ended else 0)
        while not (ended := before.listeners <= self._ended_processes(before)) and time.monotonic() < end:
            await asyncio.sleep(self._timing.poll_seconds)
        return ended

    async def _undo(
        self, engine: EngineConfig, method: ReleaseMethod, release_receipts: Sequence[Receipt], limit_seconds: float
    ) -> None:
        """Undo a release. Raises EngineError, also if the server does not serve afterwards."""
        assert method.undo is not None
        models = release_receipts[0].models
        await self.engines.carry_out(engine.name, method.undo(engine, models), limit_seconds)
        if method.stops_service and not method.serves(await self.engines.read(engine.name), models):
            raise EngineError("the engine responds, but isn't serving requests yet")

    def _start_restoration(self, name: str, release_receipts: Sequence[Receipt]) -> None:
        """Return a server to service in the background, unless this is in progress."""
        if name not in self._restorations:
            self._restorations[name] = task = asyncio.ensure_future(self._restore_service(name, release_receipts))
            task.add_done_callback(lambda finished: self._end_restoration(name, finished))

    def _end_restoration(self, name: str, task: asyncio.Task[None]) -> None:
        del self._restorations[name]
        self.engines.set_out_of_service(name, None)
        if not task.cancelled() and (error := task.exception()):
            log.error("engine %s: returning it to service failed", name, exc_info=error)

    async def _restore_service(self, name: str, release_receipts: Sequence[Receipt]) -> None:
        """Undo a release until the server serves, or has ended. No undo is sent to one that serves."""
        began, pauses, problem = time.monotonic(), list(self._timing.restore_pause_seconds), ""
        self.engines.set_out_of_service(name, began)
        while (engine := self.engines.declaration(name)) and (method := _method_of(engine, release_receipts)):
            if method.undo is None or not engine.wake or not self._is_alive(_listener_of(release_receipts)):
                return
            try:
                before = await self._read_memory(name)
                refuse_if(before.problem)
                if before.listener != _listener_of(release_receipts):
                    raise ReleaseRefused("another process listens at the engine's address")
                if not method.serves(await self.engines.read(name), release_receipts[0].models):
                    refuse_if(shortage_reason(unreturned_bytes(release_receipts, before), before.free))
                    await self._undo(engine, method, release_receipts, WAKE_TIMEOUT_SECONDS)
                    self._unanswered.pop(name, None)  # else the release may still be running
                after = await self._read_memory(name)
                log.info("engine %s is back in service", name)
                if self._record_receipt is not None:
                    requested_by, models = release_receipts[0].requested_by, release_receipts[0].models
                    flush = _EngineFlush(
                        engine=engine, requested_by=requested_by, method=method, before=after, models=models
                    )
                    returned_bytes = max(0, after.total_bytes - before.total_bytes)
                    needed_bytes = returned_bytes + sum(unreturned_bytes(release_receipts, after).values())
                    duration_seconds = time.monotonic() - began
                    receipt = flush.wake_receipt("woken", returned_bytes, needed_bytes, duration_seconds)
                    await self._record_receipt(receipt)
                return
            except (EngineError, ReleaseRefused) as failure:
                if str(failure) != problem:
                    log.warning("engine %s is out of service after its release: %s", name, failure)
                problem = str(failure)
                self.engines.set_out_of_service(name, began, problem)
            await asyncio.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])

    async def _read_memory(self, name: str, earlier: EngineMemory = EngineMemory()) -> EngineMemory:
        """Return the engine's processes and the driver's counts. The processes of ``earlier`` count in any case."""
        reading = await self._read_driver()
        devices = reading.devices if reading else ()
        candidates = {key for device in devices for key in device.processes_by_key}
        engine_processes = await self.engines.find_processes(name, candidates)
        processes = engine_processes.processes | earlier.processes
        used: dict[str, int] = {device.uuid: 0 for device in devices if device.uuid in earlier.used}
        usages = []
        for device in devices:
            for key, process in device.processes_by_key.items():
                if key in processes:
                    usages.append(process)
                    if process.used_bytes is not None:
                        used[device.uuid] = used.get(device.uuid, 0) + process.used_bytes
        return EngineMemory(
            listeners=engine_processes.listeners,
            processes=processes,
            used=used,
            free={device.uuid: device.free_bytes for device in devices if device.free_bytes is not None},
            uid=engine_processes.uid,
            use_ratio=utilization_of(usages),
            problem=engine_processes.problem or ("" if devices else "the driver doesn't respond"),
        )

    def _ended_processes(self, memory: EngineMemory) -> frozenset[ProcessKey]:
        """Return the processes that have ended since."""
        return frozenset(key for key in memory.listeners | memory.processes if not self._is_alive(key))

    def _is_alive(self, key: ProcessKey) -> bool:
        start = read_process_stat("/proc", key.pid)
        return start is not None and start.start_ticks == key.start_ticks and start.state not in ENDED_STATES


def _allowed_method(engine: EngineConfig) -> ReleaseMethod:
    """Return the method that the declaration allows. Raises Refused."""
    spec, method = engine.spec, engine.release_method
    if spec.no_methods_reason:
        raise ReleaseRefused(f"kind {engine.kind} can't be released: {spec.no_methods_reason}")
    if method is None:
        warning = f" (note: {spec.warning})" if spec.warning else ""
        raise ReleaseRefused(f"the configuration doesn't allow this; add allow: [engine]{warning}")
    return method


def _user_mismatch(request: FlushRequest, memory: EngineMemory) -> str:
    """Return the reason why the engine is not that of the request's user; empty if it is."""
    uid = request.target.uid
    return "" if uid in (None, memory.uid) else f"the engine's listener doesn't belong to uid {uid}"


def _listener_of(release_receipts: Sequence[Receipt]) -> ProcessKey:
    return ProcessKey(release_receipts[0].pid, release_receipts[0].start_ticks)


def _method_of(engine: EngineConfig, release_receipts: Sequence[Receipt]) -> ReleaseMethod | None:
    """Return the method of a release, which the declaration may not name anymore."""
    name = release_receipts[0].method
    return next((method for method in engine.spec.methods if method.name == name), engine.release_method)


class EnginesPart(Part):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._engines = core.find(Engines) or Engines()
        core.provide(Engines, self._engines)
        core.provide(EngineStep, EngineFlusher(self._engines, core.read_driver))

    def start(self) -> None:
        self._engines.configure(self._core.settings.engines)
        self._engines.start(self._core.gpu_processes)

    def observe(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, engines=self._engines.readings())

    async def configure(self, settings: Settings) -> None:
        self._engines.configure(settings.engines)

    async def close(self) -> None:
        await self._engines.close()
