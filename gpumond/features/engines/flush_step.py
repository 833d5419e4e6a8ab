"""The flush step ``engine``: a declared serving engine releases its memory on request, and the driver proves it.

The engine's answer is not the proof: most engines answer before anything is free, and some if nothing will be. The
receipt states what the driver counts for the engine's processes before and after. Nothing is sent unless all checks
pass, and no release is repeated after a timeout. A release that takes the server out of service and returns nothing is
undone until the server serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpumond.facts.engines import EngineReading, EngineState
from gpumond.facts.errors import EngineError, EngineRejected, EngineTimeout
from gpumond.facts.flush import receipt_without_bytes
from gpumond.facts.pools import ENGINE_STEP, Expected, Held, Outcome, Receipt, StepResult
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import Reading
from gpumond.facts.units import human
from gpumond.features.engines import checks as checks
from gpumond.features.engines.checks import EngineMemory
from gpumond.features.engines.kinds import spec_of
from gpumond.features.engines.ownership import Owned
from gpumond.features.engines.spec import Declaration, Dialogue, Lever, T
from gpumond.host.event_loop import cancelled
from gpumond.host.machine import process_start

log = logging.getLogger(__name__)

FAILED_SETTLE_SECONDS = 5.0
WAKE_SECONDS = 300.0
"""Limit of a wake, which may load a model from disk."""

ENDED_STATES = ("Z", "X")
KV_CACHE = "kv_cache"
"""The lever that drops what no other lever moves to the host."""


class EngineAccess(Protocol):
    """The declared engines; `engines.poller.Engines` documents each method."""

    def readings(self) -> tuple[EngineReading, ...]: ...
    def declaration(self, name: str) -> Declaration | None: ...
    async def read(self, name: str) -> EngineState: ...
    async def owned(self, name: str, candidates: Iterable[ProcessKey]) -> Owned: ...
    async def carry_out(self, name: str, dialogue: Dialogue[T], seconds: float) -> T: ...
    async def host_memory(self, processes: Iterable[ProcessKey]) -> int | None: ...
    def returning(self, name: str, since: float | None, problem: str = "") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """``reads`` are spread over ``idle_seconds``. ``settle_seconds`` limits each lever's own time. A server is returned
    to service after the pauses ``return_seconds``, the last of which is repeated.
    """

    reads: int = 3
    idle_seconds: float = 10.0
    poll_seconds: float = 0.25
    stable_seconds: float = 1.0
    settle_seconds: float = 60.0
    return_seconds: tuple[float, ...] = (2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A flush of one engine. ``timeout_seconds`` limits the release; a lever that takes longer has its own limit.

    ``uid``: the engine is that of another user's request unless its listener belongs to this user.
    """

    name: str
    requested_by: str
    uid: int | None = None
    dry_run: bool = False
    force: bool = False
    wake: bool = False
    min_reclaimable_bytes: int = 0
    timeout_seconds: float = 30.0


class Refused(Exception):
    """A check failed; nothing was sent. ``outcome`` is ``nothing`` if there is nothing to release."""

    def __init__(self, reason: str, outcome: Outcome = "refused") -> None:
        super().__init__(reason)
        self.outcome = outcome


class EngineFlusher:
    """Executor of the step, one lever at a time for each engine and for each tree of processes."""

    def __init__(
        self,
        engines: EngineAccess,
        read_driver: Callable[[], Awaitable[Reading | None]],
        receipts: Callable[[], Iterable[Receipt]],
        timing: Timing = Timing(),
        proc: str = "/proc",
        returned: Callable[[Receipt], Awaitable[None]] | None = None,
    ) -> None:
        self.engines, self._returned = engines, returned
        self._read_driver, self._receipts, self._timing, self._proc = read_driver, receipts, timing, proc
        self._under_way: dict[str, frozenset[ProcessKey]] = {}
        self._unanswered: dict[str, frozenset[ProcessKey]] = {}
        """By name: the listeners of an engine that did not answer its last release in time."""
        self._returns: dict[str, asyncio.Task[None]] = {}
        """By name: the return to service of an engine that does not serve yet."""

    def resume(self) -> None:
        """Continue to return servers to service, as the previous daemon did."""
        for reading in self.engines.readings():
            released = checks.outstanding(self._receipts(), reading.name)
            if checks.useless(released):
                self._begin_return(reading.name, released)

    async def close(self) -> None:
        await cancelled(self._returns.values())

    async def flush(self, request: EngineRequest) -> list[Receipt]:
        """Release the memory of one engine, or undo the last release, and return a receipt for each device."""
        began, started_at = time.monotonic(), time.time()
        engine = self.engines.declaration(request.name)
        memory = EngineMemory(used={}, free={})
        draft = _Draft(request, engine, started_at, checks.last_wake_seconds(self._receipts(), request.name))
        try:
            lever = self._lever(engine, request.name)
            draft.lever = lever
            memory = await self._memory(request.name)
            _require(memory.problem or _foreign(request, memory))
            assert engine is not None
            with self._held(request, memory):
                act = self._wake if request.wake else self._release
                receipts = await act(engine, lever, request, memory, draft)
        except Refused as refusal:
            receipts = [draft.receipt(memory, refusal.outcome, str(refusal))]
        except EngineError as error:
            receipts = [draft.receipt(memory, "refused", str(error))]
        return [replace(receipt, duration_seconds=time.monotonic() - began) for receipt in receipts]

    def _lever(self, engine: Declaration | None, name: str) -> Lever:
        if engine is None:
            raise Refused(f"no engine {name} is declared")
        spec = spec_of(engine.kind)
        if spec.without_levers:
            raise Refused(f"kind {engine.kind} cannot be released: {spec.without_levers}")
        lever = spec.lever(engine)
        if lever is None:
            warning = f" (note: {spec.warning})" if spec.warning else ""
            raise Refused(f"its declaration does not allow it; add allow: [engine]{warning}")
        return lever

    def _held(self, request: EngineRequest, memory: EngineMemory) -> _Entry:
        own = memory.listeners | memory.processes
        if request.dry_run:
            return _Entry({}, request.name, own)
        if request.name in self._under_way or any(own & other for other in self._under_way.values()):
            raise Refused("another flush of it is in progress; wait for its receipt")
        if request.name in self._returns and not request.wake:
            raise Refused("gpumond returns it to service after its last release, and repeats this until it serves")
        if self._unanswered.get(request.name) == memory.listeners and not (request.force or request.wake):
            raise Refused("its last release did not answer, and may still run; read its state, then use --force")
        self._unanswered.pop(request.name, None)
        return _Entry(self._under_way, request.name, own)

    async def _release(
        self, engine: Declaration, lever: Lever, request: EngineRequest, before: EngineMemory, draft: _Draft
    ) -> list[Receipt]:
        name = engine.name
        if not before.processes:
            raise Refused("no process of its server is on a device: it has loaded nothing, or the address is a proxy's")
        states = [await self.engines.read(name)]
        if states[0].asleep and not lever.ends_holder:  # a process that sleeps keeps its context
            raise Refused("it sleeps already", "nothing")
        if states[0].paused:
            raise Refused("it is paused, and not by gpumond: resume it first")
        if not before.total:
            raise Refused("the driver counts no memory for it", "nothing")
        expected = lever.estimate(engine, states[0], before.total)
        if not expected.likely:
            likely = min(expected.high, checks.last_released(self._receipts(), name, lever.name))
            expected = replace(expected, likely=likely)
        draft.expected = expected
        if expected.high < request.min_reclaimable_bytes:
            least = human(request.min_reclaimable_bytes)
            raise Refused(f"{human(expected.high)} is reclaimable, less than the {least} asked for", "nothing")
        fresh, uses = before, [before.use_ratio]
        _require(checks.obstacle(lever, states, uses))
        if lever.check is not None:
            _require(await self.engines.carry_out(name, lever.check(engine, states[0]), lever.call_seconds))
        dropped = checks.last_released(self._receipts(), name, KV_CACHE)
        available = await self.engines.host_memory(before.processes)
        _require(checks.memory_obstacle(lever, max(0, expected.high - dropped), available))
        if request.dry_run:
            return draft.receipts(before, None, "planned", "")
        for _ in range(self._timing.reads - 1):
            await asyncio.sleep(self._timing.idle_seconds / (self._timing.reads - 1))
            fresh = await self._memory(name)
            uses.append(fresh.use_ratio)
            _require(checks.replaced(before, fresh) or _foreign(request, fresh))
            states.append(await self.engines.read(name))
            _require(checks.obstacle(lever, states, uses))
        began = time.monotonic()
        error: EngineError | None = None
        try:
            limit = max(lever.call_seconds, request.timeout_seconds)
            draft.models = await self.engines.carry_out(name, lever.release(engine, states[-1]), limit)
        except EngineError as failure:
            error = failure
        after = await self._settled(name, lever, fresh, expected, error)
        outcome, reason = checks.verdict(lever, expected, fresh, after, self._ended(fresh), error)
        if outcome == "timeout" or isinstance(error, EngineTimeout):
            self._unanswered[name] = fresh.listeners
        step = StepResult(ENGINE_STEP, max(0, fresh.total - after.total), time.monotonic() - began, lever.name)
        receipts = draft.receipts(fresh, after, outcome, reason, step)
        if lever.stops_service and lever.undo and engine.wake and checks.useless(receipts):
            self._begin_return(name, receipts)
            note = "gpumond returns it to service"
            receipts = [replace(each, reason="; ".join(filter(None, (each.reason, note)))) for each in receipts]
        return receipts

    async def _settled(
        self, name: str, lever: Lever, before: EngineMemory, expected: Expected, error: EngineError | None
    ) -> EngineMemory:
        """Return the memory once the driver counts the release and two reads are equal, or time is up."""
        limit = min(lever.settle_seconds, self._timing.settle_seconds)
        end = time.monotonic() + (min(limit, FAILED_SETTLE_SECONDS) if error else limit)
        changed_at = time.monotonic()
        latest = await self._memory(name, before)
        while time.monotonic() < end:
            stable = time.monotonic() - changed_at >= self._timing.stable_seconds
            released = before.total - latest.total
            if (
                stable
                and latest.counts(before)
                and released > checks.TOLERANCE_BYTES
                and released >= checks.FREED_RATIO * expected.likely
            ):
                break
            if before.listeners <= self._ended(before) and not latest.total:
                break
            await asyncio.sleep(self._timing.poll_seconds)
            memory = await self._memory(name, before)
            changed_at = changed_at if memory.used == latest.used else time.monotonic()
            latest = memory
        return latest

    async def _wake(
        self, engine: Declaration, lever: Lever, request: EngineRequest, before: EngineMemory, draft: _Draft
    ) -> list[Receipt]:
        released = checks.outstanding(self._receipts(), engine.name)
        if not released or _listener_of(released) != before.listener:
            raise Refused("gpumond has released nothing of it that is not back already", "nothing")
        used = _used(engine, released) or lever
        if all(receipt.outcome == "refused" for receipt in released) and not used.stops_service:
            raise Refused("gpumond has released nothing of it that is not back already", "nothing")
        if used.undo is None or not engine.wake:
            raise Refused(f"it is not woken: {used.serves_again if engine.wake else 'its declaration has wake: false'}")
        needed = checks.missing(released, before.used)
        _require(checks.shortage(needed, before.free))
        draft.lever, draft.models = used, released[0].models
        if request.dry_run:
            return [draft.receipt(before, "planned", f"it would take {human(sum(needed.values()))} again")]
        if task := self._returns.get(engine.name):
            await cancelled([task])
        began = time.monotonic()
        problem: EngineError | None = None
        try:
            await self._undo(engine, used, released, max(WAKE_SECONDS, request.timeout_seconds))
        except EngineError as error:
            problem = error
        if await self._server_ended(before, problem):
            return [draft.receipt(before, "failed", "the server ended after the call; see its log")]
        if problem is not None:
            outcome: Outcome = "timeout" if isinstance(problem, EngineTimeout) else "failed"
            note = "the call may still be in progress" if outcome == "timeout" else ""
            if used.stops_service:
                self._begin_return(engine.name, released)
                note = "gpumond repeats it until the server serves"
            return [draft.receipt(before, outcome, "; ".join(filter(None, (str(problem), note))))]
        enough = checks.FREED_RATIO * sum(needed.values())
        end = time.monotonic() + min(used.settle_seconds, self._timing.settle_seconds)
        more = (await self._memory(engine.name)).total - before.total
        while more < enough and time.monotonic() < end:
            await asyncio.sleep(self._timing.poll_seconds)
            more = (await self._memory(engine.name)).total - before.total
        outcome = "woken" if more >= enough or used.stops_service else "nothing"
        return [draft.woken(before, outcome, used, more, sum(needed.values()), time.monotonic() - began)]

    async def _server_ended(self, before: EngineMemory, problem: EngineError | None) -> bool:
        """Return whether the server has ended. The kernel closes a process's connections before it reports the end."""
        lost = problem is not None and not isinstance(problem, (EngineRejected, EngineTimeout))
        end = time.monotonic() + (min(self._timing.settle_seconds, FAILED_SETTLE_SECONDS) if lost else 0)
        while not (ended := before.listeners <= self._ended(before)) and time.monotonic() < end:
            await asyncio.sleep(self._timing.poll_seconds)
        return ended

    async def _undo(self, engine: Declaration, lever: Lever, released: Sequence[Receipt], seconds: float) -> None:
        """Undo a release. Raises EngineError, also if the server does not serve afterwards."""
        assert lever.undo is not None
        models = released[0].models
        await self.engines.carry_out(engine.name, lever.undo(engine, models), seconds)
        if lever.stops_service and not lever.serves(await self.engines.read(engine.name), models):
            raise EngineError("it answered, and does not serve yet")

    def _begin_return(self, name: str, released: Sequence[Receipt]) -> None:
        """Return a server to service in the background, unless this is in progress."""
        if name not in self._returns:
            self._returns[name] = task = asyncio.ensure_future(self._return(name, released))
            task.add_done_callback(lambda done: self._returned_to_service(name, done))

    def _returned_to_service(self, name: str, task: asyncio.Task[None]) -> None:
        del self._returns[name]
        self.engines.returning(name, None)
        if not task.cancelled() and (error := task.exception()):
            log.error("engine %s: its return to service failed", name, exc_info=error)

    async def _return(self, name: str, released: Sequence[Receipt]) -> None:
        """Undo a release until the server serves, or has ended. No undo is sent to one that serves."""
        began, pauses, problem = time.monotonic(), list(self._timing.return_seconds), ""
        self.engines.returning(name, began)
        while (engine := self.engines.declaration(name)) and (lever := _used(engine, released)):
            if lever.undo is None or not engine.wake or not self._is_alive(_listener_of(released)):
                return
            try:
                memory = await self._memory(name)
                _require(memory.problem)
                if memory.listener != _listener_of(released):
                    raise Refused("another process listens at its address")
                serves = lever.serves(await self.engines.read(name), released[0].models)
                if not serves:
                    needed = checks.missing(released, memory.used)
                    _require(checks.shortage(needed, memory.free))
                    await self._undo(engine, lever, released, WAKE_SECONDS)
                after = await self._memory(name)
                self._unanswered.pop(name, None)
                log.info("engine %s serves again", name)
                if self._returned is not None:
                    request = EngineRequest(name=name, requested_by=released[0].requested_by, wake=True)
                    draft = _Draft(request, engine, time.time(), None)
                    draft.lever, draft.models = lever, released[0].models
                    missing = sum(checks.missing(released, after.used).values())
                    seconds, more = time.monotonic() - began, max(0, after.total - memory.total)
                    await self._returned(draft.woken(after, "woken", lever, more, more + missing, seconds))
                return
            except (EngineError, Refused) as failure:
                if str(failure) != problem:
                    log.warning("engine %s does not serve after its release: %s", name, failure)
                problem = str(failure)
                self.engines.returning(name, began, problem)
            await asyncio.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])

    async def _memory(self, name: str, known: EngineMemory | None = None) -> EngineMemory:
        """Return the engine's processes and the driver's counts. ``known``: processes that are counted in any case."""
        reading = await self._read_driver()
        devices = reading.devices if reading else ()
        found = await self.engines.owned(name, {key for device in devices for key in device.processes_by_key})
        processes = found.processes | (known.processes if known else frozenset())
        used: dict[str, int] = {}
        listed = []
        for device in devices:
            if known and device.uuid in known.used:
                used[device.uuid] = 0
            for key, process in device.processes_by_key.items():
                listed += [process] if key in processes else []
                if key in processes and process.used_bytes is not None:
                    used[device.uuid] = used.get(device.uuid, 0) + process.used_bytes
        problem = found.problem or ("" if devices else "the driver does not answer")
        return EngineMemory(
            listeners=found.listeners,
            processes=processes,
            used=used,
            free={device.uuid: device.free_bytes for device in devices if device.free_bytes is not None},
            uid=found.uid,
            use_ratio=checks.use_of(listed),
            problem=problem,
        )

    def _ended(self, memory: EngineMemory) -> frozenset[ProcessKey]:
        """Return the processes that have ended since."""
        return frozenset(key for key in memory.listeners | memory.processes if not self._is_alive(key))

    def _is_alive(self, key: ProcessKey) -> bool:
        start = process_start(self._proc, key.pid)
        return start is not None and start.start_ticks == key.start_ticks and start.state not in ENDED_STATES


def _require(reason: str) -> None:
    if reason:
        raise Refused(reason)


def _foreign(request: EngineRequest, memory: EngineMemory) -> str:
    """Return the reason why the engine is not that of the request's user; empty if it is."""
    if request.uid in (None, memory.uid):
        return ""
    return f"its listener does not belong to uid {request.uid}"


def _listener_of(released: Sequence[Receipt]) -> ProcessKey:
    return ProcessKey(released[0].pid, released[0].start_ticks)


def _used(engine: Declaration, released: Sequence[Receipt]) -> Lever | None:
    """Return the lever of a release, which the declaration may not name any more."""
    spec = spec_of(engine.kind)
    named = next((each for each in spec.levers if each.name == released[0].lever), None)
    return named or spec.lever(engine)


class _Entry:
    """Entry of a table while a block runs."""

    def __init__(self, table: dict[str, frozenset[ProcessKey]], name: str, keys: frozenset[ProcessKey]) -> None:
        self._table, self._name, self._keys = table, name, keys

    def __enter__(self) -> None:
        self._table[self._name] = self._keys

    def __exit__(self, *failure: object) -> None:
        del self._table[self._name]


class _Draft:
    """Receipts of one flush, whose parts become known one after the other."""

    def __init__(
        self, request: EngineRequest, engine: Declaration | None, started_at: float, wake_seconds: float | None
    ) -> None:
        self._request, self._engine = request, engine
        self._started_at, self._wake_seconds = started_at, wake_seconds
        self.lever: Lever | None = None
        self.expected: Expected | None = None
        self.models: tuple[str, ...] = ()

    def receipt(self, memory: EngineMemory, outcome: Outcome, reason: str) -> Receipt:
        lever, name = self.lever, self._request.name
        bare = receipt_without_bytes(
            memory.listener, name, outcome, reason, self._request.requested_by, self._started_at
        )
        return replace(
            bare,
            allocator=self._engine.kind if self._engine else None,
            lever=lever.name if lever else None,
            models=self.models,
            wake=lever.serves_again.replace("NAME", name) if lever else "",
            wake_seconds=self._wake_seconds,
        )

    def woken(
        self, memory: EngineMemory, outcome: Outcome, lever: Lever, more: int, needed: int, seconds: float
    ) -> Receipt:
        """Return the receipt of a wake, after which the driver counts ``more`` of the ``needed`` bytes again."""
        reason = f"the driver counts {human(max(0, more))} more of {human(needed)} released"
        return replace(
            self.receipt(memory, outcome, reason),
            steps=(StepResult("wake", 0, seconds, lever.name),),
            duration_seconds=seconds,
        )

    def receipts(
        self, before: EngineMemory, after: EngineMemory | None, outcome: Outcome, reason: str, *steps: StepResult
    ) -> list[Receipt]:
        """Return one receipt for each device; ``after`` is None for a plan."""
        bare = self.receipt(before, outcome, reason)
        made = []
        for uuid, used in sorted(before.used.items()):
            expected = checks.part_of(self.expected, used, before.total) if self.expected else None
            left = after.used.get(uuid) if after else None
            released = None if left is None else used - left
            likely = expected.likely if expected else 0
            own = replace(
                bare,
                device_uuid=uuid,
                expected=expected,
                released_bytes=max(0, released or 0),
                driver_released_bytes=released,
                before=Held(used, used - likely, likely, used),
                after=None if left is None else Held(left, left, 0, left),
                steps=tuple(replace(step, released_bytes=max(0, released or 0)) for step in steps),
            )
            made.append(own)
        return made
