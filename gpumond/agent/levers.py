"""The allocators of this process: read them, flush one, and say what came of it.

A flush is judged by the allocator's own count of held bytes, before minus after. What the driver saw is
the daemon's business.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumond.agent.adapters import KNOWN, AllocatorAdapter, Refused, present
from gpumond.model import STEPS, Expected, Held, Outcome, PoolUsage, Receipt, Reclaimable, StepResult
from gpumond.wire import Flush, PoolChange, Result, clean

RETURNING = frozenset(("spill", "cache", "trim"))
"""Steps that give bytes back to the driver; the others only make them returnable."""

RELEASING = frozenset(("gc", "hooks", "spill", "ipc", "workspaces"))
"""Steps that may lower the live bytes."""

Hook = Callable[[], "int | None"]


class Levers:
    """Every allocator that the program has imported. One flush at a time."""

    def __init__(self) -> None:
        self._found: dict[str, AllocatorAdapter | None] = {}
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a hook may call flush()

    def adapters(self) -> list[AllocatorAdapter]:
        """Those known by now; looks for libraries that the program has imported since."""
        for library in KNOWN:
            if library not in self._found and library in sys.modules:
                try:
                    for adapter in present({library: KNOWN[library]}):
                        adapter.framework()
                        self._found[library] = adapter
                except Exception:  # a version of the library that the adapter does not understand
                    self._found[library] = None
        return [adapter for adapter in list(self._found.values()) if adapter is not None]

    def read(self, wait_seconds: float = 0.0) -> tuple[PoolUsage, ...] | None:
        """All pools now; None while a flush is under way: its library would stop us with the GIL in our hands."""
        if not self._lock.acquire(timeout=wait_seconds):
            return None
        try:
            return tuple(pool for adapter in self.adapters() for pool in _read(adapter))
        finally:
            self._lock.release()

    def flush(self, order: Flush, hooks: Sequence[Hook]) -> Result:
        """Carries it out in this thread. Raises nothing but what ends the thread."""
        adapter = next((adapter for adapter in self.adapters() if adapter.name == order.allocator), None)
        unknown = [step for step in order.steps if step not in STEPS]
        if adapter is None or unknown:
            what = (
                f"no step is called {unknown[0]!r}" if unknown else f"no allocator {order.allocator!r} in this process"
            )
            return Result(order.id, "refused", clean(f"{what}; nothing was done"))
        with self._lock:
            try:
                return _carry_out(order, adapter, hooks)
            except Refused as refusal:
                return Result(order.id, "refused", clean(refusal))
            except Exception as error:  # the library's own, whatever it is
                return Result(order.id, "failed", clean(f"{type(error).__name__}: {error}"))


LEVERS = Levers()
"""Those of this process."""


def check_steps(steps: Sequence[str]) -> None:
    """Raises TypeError, ValueError."""
    if isinstance(steps, str):
        raise TypeError(f"steps: expected a sequence such as ('ipc', 'cache'), got {steps!r}")
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"steps: expected some of {', '.join(STEPS)}, got {step!r}")


def receipts(steps: Sequence[str], dry_run: bool, hooks: Sequence[Hook], workload: str) -> list[Receipt]:
    """Flushes every allocator here and now."""
    found = []
    for adapter in LEVERS.adapters():
        started_at, started = time.time(), time.perf_counter()
        result = LEVERS.flush(Flush("local", adapter.name, tuple(steps), dry_run), hooks)
        seconds = time.perf_counter() - started
        for change in result.pools or (None,):
            outcome = result.outcome
            if change and outcome in ("freed", "partial", "nothing"):
                outcome = judge(released_bytes(change), change.expected)
            found.append(
                Receipt(
                    pid=os.getpid(),
                    workload=workload,
                    device_uuid=change.before.device_uuid if change else None,
                    allocator=adapter.name,
                    outcome=outcome,
                    reason=result.reason,
                    expected=change.expected if change else None,
                    released_bytes=released_bytes(change) if change else 0,
                    driver_released_bytes=None,
                    before=_held(change.before) if change else None,
                    after=_held(change.after) if change else None,
                    steps=result.steps,
                    raced=change.raced if change else False,
                    requested_by="program",
                    started_at=started_at,
                    duration_seconds=seconds,
                )
            )
    return found


def judge(released: int, expected: Expected) -> Outcome:
    if released <= 0:
        return "nothing"
    return "freed" if released >= expected.low else "partial"


def released_bytes(change: PoolChange) -> int:
    return change.before.held_bytes - change.after.held_bytes


def raced(before: PoolUsage, after: PoolUsage, steps: Sequence[str]) -> bool:
    """Whether the program allocated or freed meanwhile, by what the steps themselves cannot have done."""
    allocated = (after.device_allocations or 0) > (before.device_allocations or 0)
    grew = after.live_bytes > before.live_bytes
    shrank = after.live_bytes < before.live_bytes and not RELEASING.intersection(steps)
    return allocated or grew or shrank


def _carry_out(order: Flush, adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> Result:
    adapter.flush(())  # raises Refused where nothing may be done now
    before = adapter.read(exact=True)
    if order.dry_run:
        planned = tuple(PoolChange(pool, pool, _expected(pool, order.steps)) for pool in before)
        return Result(order.id, "planned", "", planned)
    done: list[StepResult] = []
    failure = ""
    try:
        for step in STEPS:
            if step in order.steps:
                done += _take(step, adapter, hooks)
    except Exception as error:  # a hook's or the library's own; what was done until then still counts
        if isinstance(error, Refused) and not done:
            raise
        failure = clean(error if isinstance(error, Refused) else f"{step}: {type(error).__name__}: {error}")
    after = {pool.device_uuid: pool for pool in adapter.read()}
    changes = tuple(_change(pool, after.get(pool.device_uuid), order.steps) for pool in before)
    steps = tuple(done)
    if failure:
        return Result(order.id, "failed", failure, changes, steps)
    low = sum(change.expected.low for change in changes)
    outcome = judge(sum(map(released_bytes, changes)), Expected(low, low, low))
    reason = "" if steps else f"{adapter.name} has none of the steps {', '.join(order.steps)}"
    return Result(order.id, outcome, clean(reason), changes, steps)


def _take(step: str, adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> Sequence[StepResult]:
    if step not in ("gc", "hooks"):
        return adapter.flush((step,))
    if step == "hooks" and not hooks:
        return ()
    held, started = _held_bytes(adapter), time.perf_counter()
    if step == "gc":
        detail = f"{gc.collect()} objects"
    else:
        own = sum(hook() or 0 for hook in tuple(hooks))
        detail = f"{len(hooks)} functions, {own} bytes by their own account"
    seconds = time.perf_counter() - started
    return (StepResult(step, max(0, held - _held_bytes(adapter)), seconds, detail),)


def _change(before: PoolUsage, after: PoolUsage | None, steps: Sequence[str]) -> PoolChange:
    if after is None:  # the pool itself is gone
        after = replace(before, live_bytes=0, held_bytes=0, reclaimable=Reclaimable(0, 0, 0), stranded_bytes=0)
    return PoolChange(before, after, _expected(before, steps), raced(before, after, steps))


def _expected(pool: PoolUsage, steps: Sequence[str]) -> Expected:
    if not RETURNING.intersection(steps):
        return Expected(0, 0, 0)
    return Expected(pool.reclaimable.low, pool.reclaimable.likely, pool.reclaimable.high)


def _held(pool: PoolUsage) -> Held:
    return Held(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, None)


def _held_bytes(adapter: AllocatorAdapter) -> int:
    return sum(pool.held_bytes for pool in adapter.read())


def _read(adapter: AllocatorAdapter) -> Sequence[PoolUsage]:
    try:
        return adapter.read()
    except Exception:  # the library's own; the other allocators are still read
        return ()
