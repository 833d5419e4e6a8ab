"""Carries out one flush of one allocator, step by step. What is unsafe now is left out, and said so in its step."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.agent.adapters import AllocatorAdapter, FlushRefused
from gpumond.agent.flush_result import REFUSED, changes, conclude, planned
from gpumond.agent.pending_calls import Busy, run
from gpumond.agent.stranded import StrandedEstimate
from gpumond.model.pools import STEPS, StepResult
from gpumond.protocol.messages import FlushCommand, FlushResult, clean

MAIN_THREAD_SECONDS = 2.0
"""So long a step waits for the main thread to come round."""

Hook = tuple[Callable[[], "int | None"], "int | Callable[[], int | None] | None"]
"""A function of the program that frees memory, and the bytes that it will free: a number, a function, or unknown."""


class Permits(NamedTuple):
    """``main_thread``: the program lets us interrupt its main thread between two of its bytecodes.
    ``own``: it is the program itself that asks, and its own thread may do what is only safe there."""

    main_thread: bool = False
    own: bool = False


def carry_out(
    order: FlushCommand,
    adapter: AllocatorAdapter,
    hooks: Sequence[Hook],
    permits: Permits,
    remains: StrandedEstimate,
    hooked: int | None = 0,
) -> FlushResult:
    """``hooked``: the bytes of this allocator that the hooks will free, None if that is unknown.

    Raises Refused if nothing may be done now, and what the library raises before anything is done.
    """
    try:
        return _carry_out(order, adapter, hooks, permits, remains, hooked)
    finally:
        getattr(adapter, "finish", tuple)()


def _carry_out(
    order: FlushCommand,
    adapter: AllocatorAdapter,
    hooks: Sequence[Hook],
    permits: Permits,
    remains: StrandedEstimate,
    hooked: int | None,
) -> FlushResult:
    adapter.flush(())
    before = remains.counted(adapter.read(exact=True), getattr(adapter, "left", dict)())
    if order.dry_run:
        return FlushResult(order.id, "planned", "", planned(before, order.steps, hooked))
    done: list[StepResult] = []
    failure = ""
    for step in STEPS:
        if step in order.steps and not failure:
            try:
                done += _measured(step, adapter, hooks, permits)
            except Exception as error:  # a hook's or the library's own; what was done until then still counts
                failure = clean(f"{step}: {type(error).__name__}: {error}")
    seen = changes(before, adapter.read(), order.steps, hooked)
    remains.flushed(seen, [step.step for step in done if not step.detail.startswith(REFUSED)])
    if failure:
        return FlushResult(order.id, "failed", failure, seen, tuple(done))
    outcome, reason = conclude(done, seen, order.steps, adapter.name)
    return FlushResult(order.id, outcome, clean(reason), seen, tuple(done))


def estimated(hooks: Sequence[Hook]) -> int | None:
    """The bytes that the hooks will free together; None if one of them does not say it, or fails to."""
    total = 0
    for _, estimate in tuple(hooks):
        try:
            freed = estimate() if callable(estimate) else estimate
        except Exception:  # the program's own
            return None
        if not isinstance(freed, int) or freed < 0:
            return None
        total += freed
    return total


def _measured(step: str, adapter: AllocatorAdapter, hooks: Sequence[Hook], permits: Permits) -> Sequence[StepResult]:
    """The step's own result, with the live bytes that it let go of: later steps return those."""
    live = _live_bytes(adapter)
    done = _take(step, adapter, hooks, permits)
    freed = live - _live_bytes(adapter) if done else 0
    if freed <= 0:
        return done
    last = done[-1]
    detail = f"{last.detail}, " if last.detail else ""
    return (*done[:-1], replace(last, detail=clean(f"{detail}{freed} bytes no longer live")))


def _take(step: str, adapter: AllocatorAdapter, hooks: Sequence[Hook], permits: Permits) -> Sequence[StepResult]:
    started = time.perf_counter()
    try:
        adapter.flush(())  # a capture may have begun since the last step
        if step == "gc":
            return (_collect(adapter),)
        if step == "hooks":
            return (_call(adapter, hooks),) if hooks else ()
        if step in getattr(adapter, "main_thread_steps", ()):
            return _in_main_thread(step, adapter, permits)
        return adapter.flush((step,))
    except (FlushRefused, Busy) as refusal:
        return (StepResult(step, 0, time.perf_counter() - started, clean(f"{REFUSED}{refusal}")),)


def _in_main_thread(step: str, adapter: AllocatorAdapter, permits: Permits) -> Sequence[StepResult]:
    own = permits.own and threading.current_thread() is threading.main_thread()
    if not (own or permits.main_thread):
        raise FlushRefused("it is safe in the main thread only: start(main_thread=True) lets us work there")
    return run(lambda: adapter.flush((step,)), MAIN_THREAD_SECONDS)


def _collect(adapter: AllocatorAdapter) -> StepResult:
    """The young objects first: most garbage is young, and the whole heap stalls a large program for long."""
    held, started = _held_bytes(adapter), time.perf_counter()
    young = gc.collect(1)
    between = time.perf_counter()
    old = gc.collect()
    seconds = time.perf_counter() - started
    detail = f"{young} young objects in {between - started:.3f} s, {old} old ones"
    return StepResult("gc", max(0, held - _held_bytes(adapter)), seconds, detail)


def _call(adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> StepResult:
    held, started = _held_bytes(adapter), time.perf_counter()
    own = sum(function() or 0 for function, _ in tuple(hooks))
    seconds = time.perf_counter() - started
    detail = f"{len(hooks)} functions, {own} bytes by their own account"
    return StepResult("hooks", max(0, held - _held_bytes(adapter)), seconds, detail)


def _held_bytes(adapter: AllocatorAdapter) -> int:
    return sum(pool.held_bytes for pool in adapter.read())


def _live_bytes(adapter: AllocatorAdapter) -> int:
    return sum(pool.live_bytes for pool in adapter.read())
