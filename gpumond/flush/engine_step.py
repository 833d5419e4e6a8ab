"""The flush step ``engine``: a declared serving engine releases its memory on request, and the driver proves it.

The engine's answer is not the proof: most engines answer before anything is free, and some if nothing will be. The
receipt states what the driver counts for the engine's processes before and after. Nothing is sent unless all checks
pass, and no call is repeated after a timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from gpumond.engines import spec_of
from gpumond.engines.ownership import Owned
from gpumond.engines.spec import Declaration, Dialogue, Lever, T
from gpumond.errors import EngineError, EngineTimeout
from gpumond.flush import engine_checks as checks
from gpumond.flush.engine_checks import EngineMemory
from gpumond.flush.receipts import receipt_without_bytes
from gpumond.host.processes import process_start
from gpumond.model.engines import EngineReading, EngineState
from gpumond.model.pools import ENGINE_STEP, Expected, Held, Outcome, Receipt, StepResult
from gpumond.model.process import ProcessKey
from gpumond.model.snapshot import Reading
from gpumond.model.units import human

FAILED_SETTLE_SECONDS = 5.0
WAKE_SECONDS = 300.0
"""Limit of a wake, which may load a model from disk."""

ENDED_STATES = ("Z", "X")


class EngineAccess(Protocol):
    """The declared engines; `engines.poller.Engines` documents each method."""

    def readings(self) -> tuple[EngineReading, ...]: ...
    def declaration(self, name: str) -> Declaration | None: ...
    async def read(self, name: str) -> EngineState: ...
    async def owned(self, name: str, candidates: Iterable[ProcessKey]) -> Owned: ...
    async def carry_out(self, name: str, dialogue: Dialogue[T], seconds: float) -> T: ...
    async def host_memory(self, processes: Iterable[ProcessKey]) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """``reads`` are spread over ``idle_seconds``. ``settle_seconds`` limits each lever's own time."""

    reads: int = 3
    idle_seconds: float = 10.0
    poll_seconds: float = 0.25
    stable_seconds: float = 1.0
    settle_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A flush of one engine. ``timeout_seconds`` limits the release; a lever that takes longer has its own limit."""

    name: str
    requested_by: str
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
    ) -> None:
        self.engines = engines
        self._read_driver, self._receipts, self._timing, self._proc = read_driver, receipts, timing, proc
        self._under_way: dict[str, frozenset[ProcessKey]] = {}
        self._unanswered: dict[str, frozenset[ProcessKey]] = {}
        """By name: the listeners of an engine that did not answer its last release in time."""

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
            if memory.problem:
                raise Refused(memory.problem)
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
        if states[0].asleep:
            raise Refused("it sleeps already", "nothing")
        if not before.total:
            raise Refused("the driver counts no memory for it", "nothing")
        expected = lever.estimate(engine, states[0], before.total)
        draft.expected = expected
        if expected.high < request.min_reclaimable_bytes:
            least = human(request.min_reclaimable_bytes)
            raise Refused(f"{human(expected.high)} is reclaimable, less than the {least} asked for", "nothing")
        _require(checks.obstacle(lever, states))
        if lever.check is not None:
            _require(await self.engines.carry_out(name, lever.check(engine, states[0]), lever.call_seconds))
        _require(checks.memory_obstacle(lever, expected, await self.engines.host_memory(before.processes)))
        if request.dry_run:
            return draft.receipts(before, None, "planned", "")
        for _ in range(self._timing.reads - 1):
            await asyncio.sleep(self._timing.idle_seconds / (self._timing.reads - 1))
            states.append(await self.engines.read(name))
            _require(checks.obstacle(lever, states))
        fresh = await self._memory(name)
        if fresh.listeners != before.listeners:
            raise Refused("its server was replaced during the check")
        states.append(await self.engines.read(name))
        _require(checks.obstacle(lever, states))
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
        return draft.receipts(fresh, after, outcome, reason, step)

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
        released = checks.outstanding(self._receipts(), engine.name, before.listener)
        if not released:
            raise Refused("gpumond has released nothing of it that is not back already", "nothing")
        used = next((each for each in spec_of(engine.kind).levers if each.name == released[0].lever), lever)
        if used.undo is None or not engine.wake:
            raise Refused(f"it is not woken: {used.serves_again if engine.wake else 'its declaration has wake: false'}")
        _require(checks.shortage(released, before.free))
        draft.lever, draft.models = used, released[0].models
        if request.dry_run:
            needed = sum(receipt.released_bytes for receipt in released)
            return [draft.receipt(before, "planned", f"it would take {human(needed)} again")]
        limit = max(WAKE_SECONDS, request.timeout_seconds)
        began = time.monotonic()
        try:
            await self.engines.carry_out(engine.name, used.undo(engine, released[0].models), limit)
        except EngineTimeout as error:
            return [
                draft.receipt(before, "timeout", f"{error}; the call may still be in progress, and is not repeated")
            ]
        except EngineError as error:
            return [draft.receipt(before, "failed", str(error))]
        needed = sum(receipt.released_bytes for receipt in released)
        end = time.monotonic() + min(used.settle_seconds, self._timing.settle_seconds)
        more = (await self._memory(engine.name)).total - before.total
        while more < checks.FREED_RATIO * needed and time.monotonic() < end:
            await asyncio.sleep(self._timing.poll_seconds)
            more = (await self._memory(engine.name)).total - before.total
        outcome: Outcome = "woken" if more >= checks.FREED_RATIO * needed else "nothing"
        step = StepResult("wake", 0, time.monotonic() - began, used.name)
        reason = f"the driver counts {human(max(0, more))} more of {human(needed)} released"
        return [replace(draft.receipt(before, outcome, reason), steps=(step,))]

    async def _memory(self, name: str, known: EngineMemory | None = None) -> EngineMemory:
        """Return the engine's processes and the driver's counts. ``known``: processes that are counted in any case."""
        reading = await self._read_driver()
        devices = reading.devices if reading else ()
        found = await self.engines.owned(name, {key for device in devices for key in device.processes_by_key})
        processes = found.processes | (known.processes if known else frozenset())
        used: dict[str, int] = {}
        for device in devices:
            if known and device.uuid in known.used:
                used[device.uuid] = 0
            for key, process in device.processes_by_key.items():
                if key in processes and process.used_bytes is not None:
                    used[device.uuid] = used.get(device.uuid, 0) + process.used_bytes
        problem = found.problem or ("" if devices else "the driver does not answer")
        return EngineMemory(
            listeners=found.listeners,
            processes=processes,
            used=used,
            free={device.uuid: device.free_bytes for device in devices if device.free_bytes is not None},
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
