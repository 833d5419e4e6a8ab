"""One flush of one allocator: its steps and its result.

A step that is unsafe is skipped, and its result states the reason. The result compares the pools before and after.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.agent.allocators.adapters import AllocatorAdapter, FlushRefused, capture_guards
from gpumond.agent.pending_calls import MainThreadBusy, run_in_main_thread
from gpumond.agent.prediction import StrandedEstimate, predict_pools
from gpumond.agent.settings import Hook
from gpumond.facts.messages import FlushCommand, FlushResult, PoolChange, printable_text
from gpumond.facts.pools import (
    STEPS,
    SUSPENDED_REASON,
    ExpectedRelease,
    FlushOutcome,
    PoolBytes,
    PoolUsage,
    Reclaimable,
    StepResult,
)
from gpumond.facts.units import plural

MAIN_THREAD_SECONDS = 2.0
"""Longest wait of a step for the main thread."""

LIVE_LOWERING_STEPS = frozenset(("gc", "hooks", "spill", "ipc", "workspaces", "plans"))
"""Steps that may lower the live bytes."""

REFUSED_PREFIX = "refused: "
"""Beginning of the detail of a step that was not carried out because it was unsafe."""


class Permissions(NamedTuple):
    """Permissions to run steps that are safe in the main thread only.

    ``main_thread``: the program allows the agent to interrupt its main thread between two bytecodes.
    ``requested_by_program``: the calling thread may run them if it is the main thread.
    """

    main_thread: bool = False
    requested_by_program: bool = False


REFILL_SECONDS = 10.0
REFILL_RATIO = 0.5
"""Part of the released bytes that, taken from the driver again within `REFILL_SECONDS`, counts as refilled."""

PoolKey = tuple[str, str]
"""Allocator and device UUID."""


class PoolAfterFlush(NamedTuple):
    """A pool just after a flush."""

    after: PoolUsage
    released_bytes: int
    refill_deadline: float

    def is_refilled(self, pool: PoolUsage) -> bool:
        allocated = pool.device_allocations is None or pool.device_allocations != self.after.device_allocations
        return allocated and pool.held_bytes - self.after.held_bytes >= REFILL_RATIO * self.released_bytes


class RefilledFlushes:
    """Counts flushes without benefit, whose released memory the program allocates again at once.

    The counts grow from the start of the process, as do all counters of a report.
    """

    def __init__(self) -> None:
        self._flushed_pools: dict[PoolKey, PoolAfterFlush] = {}
        self._refill_counts: dict[PoolKey, int] = {}

    def add_changes(self, changes: Iterable[PoolChange], now: float) -> None:
        for change in changes:
            released = released_bytes(change)
            if released > 0:
                self._flushed_pools[_pool_key(change.after)] = PoolAfterFlush(
                    change.after, released, now + REFILL_SECONDS
                )

    def count_refills(self, pools: Iterable[PoolUsage], now: float) -> Iterator[PoolUsage]:
        """Yield the pools, each with its number of refilled flushes."""
        for pool in pools:
            key = _pool_key(pool)
            flushed = self._flushed_pools.get(key)
            if flushed is not None and (now > flushed.refill_deadline or flushed.is_refilled(pool)):
                del self._flushed_pools[key]
                if now <= flushed.refill_deadline:
                    self._refill_counts[key] = self._refill_counts.get(key, 0) + 1
            yield replace(pool, refilled_flushes=self._refill_counts[key]) if key in self._refill_counts else pool


def _pool_key(pool: PoolUsage) -> PoolKey:
    return pool.allocator, pool.device_uuid


def run_flush(
    command: FlushCommand,
    adapter: AllocatorAdapter,
    hooks: Sequence[Hook],
    permissions: Permissions,
    stranded_estimate: StrandedEstimate,
    hook_bytes: int | None,
    deadline: float,
) -> FlushResult:
    """Flush one allocator, or plan its flush. ``hook_bytes``: the bytes of this allocator that the hooks will free,
    None if unknown. No step begins after ``deadline``, in seconds of ``time.monotonic()``.

    Raises FlushRefused if nothing may be done now, and errors of the library that occur before the first step.
    """
    try:
        adapter.check()
        if _obstacle_to_steps(deadline) == "deferred":
            return FlushResult(command.id, "deferred", SUSPENDED_REASON)
        before = stranded_estimate.adjust(adapter.read(exact=True), adapter.bytes_left_by_flush())
        if command.dry_run:
            return FlushResult(command.id, "planned", "", pool_changes(before, before, command.steps, hook_bytes))
        results: list[StepResult] = []
        failure, obstacle = "", None
        for step in STEPS:
            if step in command.steps and not failure:
                if obstacle := _obstacle_to_steps(deadline):
                    failure = f"{step}: {OBSTACLES[obstacle]}"
                    break
                try:
                    results += _run_measured_step(step, adapter, hooks, permissions)
                except Exception as error:  # of a hook or the library; the steps before it count
                    failure = printable_text(f"{step}: {type(error).__name__}: {error}")
        changes = pool_changes(before, adapter.read(), command.steps, hook_bytes)
        carried_out = [result.step for result in results if not result.detail.startswith(REFUSED_PREFIX)]
        stranded_estimate.add_changes(changes, carried_out)
        if obstacle and not results:
            return FlushResult(command.id, obstacle, printable_text(f"{failure}; nothing was done"))
        if failure:
            return FlushResult(command.id, "failed", failure, changes, tuple(results))
        outcome, reason = flush_outcome(results, changes, command.steps, adapter.name)
        return FlushResult(command.id, outcome, printable_text(reason), changes, tuple(results))
    finally:
        adapter.discard_exact_state()


OBSTACLES: Mapping[FlushOutcome, str] = {
    "deferred": "the program was suspended",
    "timeout": "the deadline passed while the driver didn't respond",
}


def _obstacle_to_steps(deadline: float) -> FlushOutcome | None:
    """Return why no step may begin. The program itself, whose flush has no deadline, is not suspended.

    A process is locked before it is suspended. The driver then still answers queries, and anything else waits for the
    resumption, and would take effect late.
    """
    guards = capture_guards()
    if guards is not None and deadline < math.inf:
        if guards.is_suspended():
            return "deferred"
        guards.wait_for_driver()
    return "timeout" if time.monotonic() >= deadline else None


def run_hooks(command: FlushCommand, hooks: Sequence[Hook]) -> FlushResult:
    """Call the program's functions in a program without pools. Only the driver's count shows their effect.

    Raises FlushRefused, and errors of the functions.
    """
    guards = capture_guards()
    if guards is not None and guards.is_capturing():
        raise FlushRefused("a CUDA graph is being captured")
    if not hooks:
        return FlushResult(command.id, "nothing", "the agent reports no pool, and the program has no on_flush function")
    if command.dry_run:
        return FlushResult(command.id, "planned")
    return FlushResult(command.id, "nothing", "", (), (_call_hooks(hooks),))


def estimated_hook_bytes(hooks: Sequence[Hook]) -> int | None:
    """Return the bytes that all hooks together will free; None if one has no estimate or its estimate fails."""
    total = 0
    for _, estimate in tuple(hooks):
        try:
            freed = estimate() if callable(estimate) else estimate
        except Exception:  # an error of the program's function
            return None
        if not isinstance(freed, int) or freed < 0:
            return None
        total += freed
    return total


def _run_measured_step(
    step: str, adapter: AllocatorAdapter, hooks: Sequence[Hook], permissions: Permissions
) -> Sequence[StepResult]:
    """Run a step, and add to its result the bytes that are no longer live: later steps return them."""
    live = _live_bytes(adapter)
    results = _run_step(step, adapter, hooks, permissions)
    freed = live - _live_bytes(adapter) if results else 0
    if freed <= 0:
        return results
    last_result = results[-1]
    detail = f"{last_result.detail}, " if last_result.detail else ""
    return (*results[:-1], replace(last_result, detail=printable_text(f"{detail}{freed} bytes no longer live")))


def _run_step(
    step: str, adapter: AllocatorAdapter, hooks: Sequence[Hook], permissions: Permissions
) -> Sequence[StepResult]:
    started = time.perf_counter()
    try:
        adapter.check()  # a capture may have begun since the last step
        if step == "gc":
            return (_run_gc_step(adapter),)
        if step == "hooks":
            return (_run_hooks_step(adapter, hooks),) if hooks else ()
        if step in adapter.main_thread_steps:
            return _run_in_main_thread(step, adapter, permissions)
        return adapter.flush((step,))
    except (FlushRefused, MainThreadBusy) as refusal:
        return (StepResult(step, 0, time.perf_counter() - started, printable_text(f"{REFUSED_PREFIX}{refusal}")),)


def _run_in_main_thread(step: str, adapter: AllocatorAdapter, permissions: Permissions) -> Sequence[StepResult]:
    is_own_thread = permissions.requested_by_program and threading.current_thread() is threading.main_thread()
    if not (is_own_thread or permissions.main_thread):
        raise FlushRefused(
            "the step is safe in the main thread only: start(main_thread=True) allows the agent to run it there"
        )
    return run_in_main_thread(lambda: adapter.flush((step,)), MAIN_THREAD_SECONDS)


def _run_gc_step(adapter: AllocatorAdapter) -> StepResult:
    """Collect young objects first: most garbage is young, and a full collection stalls a large program for long."""
    held, started = _held_bytes(adapter), time.perf_counter()
    young = gc.collect(1)
    young_end = time.perf_counter()
    old = gc.collect()
    seconds = time.perf_counter() - started
    detail = f"collected {plural(young, 'young object')} in {young_end - started:.3f} s, then {old} old"
    return StepResult("gc", max(0, held - _held_bytes(adapter)), seconds, detail)


def _run_hooks_step(adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> StepResult:
    held = _held_bytes(adapter)
    called = _call_hooks(hooks)
    return replace(called, released_bytes=max(0, held - _held_bytes(adapter)))


def _call_hooks(hooks: Sequence[Hook]) -> StepResult:
    started = time.perf_counter()
    freed = sum(function() or 0 for function, _ in tuple(hooks))
    seconds = time.perf_counter() - started
    return StepResult("hooks", 0, seconds, f"{plural(len(hooks), 'function')} reported {freed} bytes")


def _held_bytes(adapter: AllocatorAdapter) -> int:
    return sum(pool.held_bytes for pool in adapter.read())


def _live_bytes(adapter: AllocatorAdapter) -> int:
    return sum(pool.live_bytes or 0 for pool in adapter.read())


def release_outcome(released: int, expected_low: int) -> FlushOutcome:
    if released <= 0:
        return "nothing"
    return "freed" if released >= expected_low else "partial"


def released_bytes(change: PoolChange) -> int:
    return change.before.held_bytes - change.after.held_bytes


def has_raced(before: PoolUsage, after: PoolUsage, steps: Sequence[str]) -> bool:
    """Return whether the program allocated or freed during the flush, based on changes that no step can cause."""
    allocated = (after.device_allocations or 0) > (before.device_allocations or 0)
    if before.live_bytes is None or after.live_bytes is None:
        return allocated
    grew = after.live_bytes > before.live_bytes
    shrank = after.live_bytes < before.live_bytes and not LIVE_LOWERING_STEPS.intersection(steps)
    return allocated or grew or shrank


def pool_changes(
    before: Iterable[PoolUsage], after: Iterable[PoolUsage], steps: Sequence[str], hook_bytes: int | None
) -> tuple[PoolChange, ...]:
    before, after_by_device = tuple(before), {pool.device_uuid: pool for pool in after}
    return tuple(
        _pool_change(pool, after_by_device.get(pool.device_uuid), steps, predicted)
        for pool, predicted in zip(before, predict_pools(before, steps, hook_bytes), strict=True)
    )


def pool_bytes(pool: PoolUsage) -> PoolBytes:
    return PoolBytes(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, None)


def flush_outcome(
    results: Sequence[StepResult], changes: Sequence[PoolChange], requested_steps: Sequence[str], allocator: str
) -> tuple[FlushOutcome, str]:
    """Return outcome and reason of a flush that was carried out to its end."""
    refused = [f"{result.step} {result.detail}" for result in results if result.detail.startswith(REFUSED_PREFIX)]
    if not results:
        return "nothing", f"{allocator} has none of the steps {', '.join(requested_steps)}"
    if len(refused) == len(results):
        return "refused", "; ".join(refused)
    expected_low = sum(change.expected.low for change in changes)
    return release_outcome(sum(map(released_bytes, changes)), expected_low), "; ".join(refused)


def _pool_change(
    before: PoolUsage, after: PoolUsage | None, steps: Sequence[str], predicted: ExpectedRelease
) -> PoolChange:
    if after is None:  # the pool no longer exists
        after = replace(before, live_bytes=0, held_bytes=0, reclaimable=Reclaimable(0, 0, 0), stranded_bytes=0)
    return PoolChange(before, after, predicted, has_raced(before, after, steps))
