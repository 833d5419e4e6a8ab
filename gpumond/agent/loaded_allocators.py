"""The allocators of this process: reads them, flushes one, limits them, and builds receipts.

The outcome of a flush follows from the allocator's own count of held bytes, before minus after. The driver's count
belongs to the daemon. Commands of the daemon are limited in rate.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

from gpumond.agent.allocators.adapters import (
    ADAPTERS,
    AllocatorAdapter,
    FlushRefused,
    adapter_if_imported,
    capture_guards,
)
from gpumond.agent.flushing import (
    Permissions,
    RefilledFlushes,
    estimated_hook_bytes,
    pool_bytes,
    release_outcome,
    released_bytes,
    run_flush,
    run_hooks,
)
from gpumond.agent.prediction import StrandedEstimate
from gpumond.agent.settings import Hook
from gpumond.agent.transport import RateLimit
from gpumond.facts.messages import FlushCommand, FlushResult, printable_text
from gpumond.facts.pools import STEPS, PoolUsage, Receipt
from gpumond.facts.program import AppliedLimit, PoolLimit

AdapterT = TypeVar("AdapterT")
ResultT = TypeVar("ResultT")

FLUSH_RATE = (16, 6.0)
PLAN_RATE = (60, 1.0)
"""Number of the daemon's commands at once, then seconds for each further one. A plan may visit every block."""

SEARCH_INTERVAL_SECONDS = 5.0
"""Shortest time between two searches. Some allocators are imported long before they are used, and querying all of them
takes longer than reading those in use.
"""


class LoadedAllocators:
    """Every allocator that the program has imported. Runs one flush at a time."""

    def __init__(self) -> None:
        self._adapters_by_module: dict[str, AllocatorAdapter] = {}
        self._adapters: list[AllocatorAdapter] = []
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a hook may call flush()
        self._module_count, self._next_search_at = 0, 0.0
        self._refilled_flushes, self._stranded = RefilledFlushes(), StrandedEstimate()
        self._flush_rate, self._plan_rate = RateLimit(*FLUSH_RATE), RateLimit(*PLAN_RATE)
        self.refusals = 0
        """Number of commands that exceeded the rate or contained an unknown step."""
        self._limits: dict[tuple[str, str], PoolLimit] = {}
        self._own_limits: dict[tuple[str, str], int] = {}
        """Those that no quota has set, by allocator and device. A quota may have lowered them."""

    def find_adapters(self) -> list[AllocatorAdapter]:
        """Search for libraries that the program has imported since, and return all adapters."""
        for spec in ADAPTERS:
            if spec.module not in self._adapters_by_module and spec.library in sys.modules:
                # a version of the library that the adapter does not understand, or a part that is still being imported
                with suppress(Exception):
                    if adapter := adapter_if_imported(spec):
                        adapter.framework()
                        self._adapters_by_module[spec.module] = adapter
        # in the order of ADAPTERS, whichever was imported first
        self._adapters = [
            self._adapters_by_module[spec.module] for spec in ADAPTERS if spec.module in self._adapters_by_module
        ]
        self._module_count, self._next_search_at = len(sys.modules), time.monotonic() + SEARCH_INTERVAL_SECONDS
        return self._adapters

    def adapters(self) -> list[AllocatorAdapter]:
        """Return the adapters of the last search if nothing was imported since, as the same list object."""
        if len(sys.modules) == self._module_count and time.monotonic() < self._next_search_at:
            return self._adapters
        return self.find_adapters()

    def read(self, wait_seconds: float = 0.0) -> tuple[PoolUsage, ...] | None:
        """Return all current pools; None while a flush is in progress: its library would block with the GIL held."""
        if not self._lock.acquire(timeout=wait_seconds):
            return None
        try:
            adapters = self.adapters()
            with _relax_capture_mode():
                pools = _read_pools(*adapters)
            return tuple(self._refilled_flushes.count_refills(self._stranded.adjust(pools), time.monotonic()))
        finally:
            self._lock.release()

    def execute(
        self, command: FlushCommand, hooks: Sequence[Hook], main_thread: bool = False, deadline: float = math.inf
    ) -> FlushResult:
        """Carry out a command of the daemon in this thread, within the rate.

        ``main_thread``: the program allows interruption of its main thread between two bytecodes. ``deadline``: the
        time of ``time.monotonic()`` from which no step begins, because the daemon no longer waits.
        """
        rate = self._plan_rate if command.dry_run else self._flush_rate
        if not rate.allows(time.monotonic()):
            self.refusals += 1
            return FlushResult(command.id, "refused", f"too many commands; {self.refusals} refused so far")
        return self.flush(command, hooks, Permissions(main_thread), deadline)

    def flush(
        self, command: FlushCommand, hooks: Sequence[Hook], permissions: Permissions, deadline: float = math.inf
    ) -> FlushResult:
        """Flush in this thread. Library errors become results.

        Without the name of an allocator, only the program's functions are called: the program has no pool.
        """
        adapter = next((adapter for adapter in self.find_adapters() if adapter.name == command.allocator), None)
        unknown = [step for step in command.steps if step not in STEPS]
        if unknown:
            self.refusals += 1
            return FlushResult(
                command.id, "refused", printable_text(f"no step is called {unknown[0]!r}; nothing was done")
            )
        if adapter is None and command.allocator:
            reason = f"no allocator {command.allocator!r} in this process; nothing was done"
            return FlushResult(command.id, "refused", printable_text(reason))
        with self._lock:
            try:
                if adapter is None:
                    with _delay_captures():
                        return run_hooks(command, hooks)
                hook_bytes = self._hook_bytes(adapter, hooks) if "hooks" in command.steps else 0
                with _delay_captures():
                    result = run_flush(command, adapter, hooks, permissions, self._stranded, hook_bytes, deadline)
            except FlushRefused as refusal:
                return FlushResult(command.id, "refused", printable_text(refusal))
            except Exception as error:  # any error of the library
                return FlushResult(command.id, "failed", printable_text(f"{type(error).__name__}: {error}"))
            if not command.dry_run:
                self._refilled_flushes.add_changes(result.pools, time.monotonic())
            return result

    def limits(self) -> tuple[PoolLimit, ...]:
        """Return the soft limits that are set, by the program or by the daemon."""
        return tuple(self._limits.values())

    def note_limits(self, applied: Sequence[AppliedLimit], quota: str) -> None:
        """Remember the limits that were applied, for `limits` and `own_limits`."""
        limits, own_limits = dict(self._limits), dict(self._own_limits)
        for limit in applied:
            if limit.applied and limit.device_uuid is not None:
                key = limit.allocator, limit.device_uuid
                limits.pop(key, None)
                if not quota:
                    own_limits.pop(key, None)
                if limit.limit_bytes is not None:
                    limits[key] = PoolLimit(limit.allocator, limit.device_uuid, limit.limit_bytes, quota)
                    if not quota:
                        own_limits[key] = limit.limit_bytes
        self._limits, self._own_limits = limits, own_limits

    def own_limits(self, adapter: AllocatorAdapter) -> dict[str, int]:
        """Return the lowest limit of the program itself on each device, whichever function has set it."""
        limits: dict[str, int] = {}
        try:
            limits |= adapter.own_limits()
        except Exception:  # an error of the library, or a refusal, which the limit itself will state
            pass
        for (allocator, uuid), size in self._own_limits.items():
            if allocator == adapter.name:
                limits[uuid] = min(size, limits.get(uuid, size))
        return limits

    def _hook_bytes(self, adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> int | None:
        """Return the adapter's part, by live bytes, of the bytes that the hooks will free; None if unknown."""
        freed = estimated_hook_bytes(hooks)
        if not freed or len(self._adapters) < 2:
            return freed
        with _relax_capture_mode():
            live = {
                each: sum(pool.live_bytes or 0 for pool in _read_pools(each) if not pool.inside)
                for each in self._adapters
            }
        total = sum(live.values())
        return freed * live[adapter] // total if total else freed


ALLOCATORS = LoadedAllocators()
"""The allocators of this process."""


def check_steps(steps: Sequence[str]) -> None:
    """Raise TypeError or ValueError for wrong steps."""
    if isinstance(steps, str):
        raise TypeError(f"steps: expected a sequence such as ('ipc', 'cache'), got {steps!r}")
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"steps: expected one or more of {', '.join(STEPS)}, got {step!r}")


def flush_all(
    steps: Sequence[str], dry_run: bool, hooks: Sequence[Hook], workload: str, main_thread: bool
) -> list[Receipt]:
    """Flush every allocator in the calling thread."""
    permissions = Permissions(main_thread, requested_by_program=True)
    receipts = [
        receipt
        for adapter in ALLOCATORS.find_adapters()
        for receipt in _flush_allocator(
            FlushCommand("local", adapter.name, tuple(steps), dry_run), hooks, permissions, workload
        )
    ]
    called = any(receipt.before or "hooks" in (step.step for step in receipt.steps) for receipt in receipts)
    if "hooks" in steps and hooks and not called:
        receipts += _flush_allocator(FlushCommand("local", "", ("hooks",), dry_run), hooks, permissions, workload)
    return receipts


def _flush_allocator(
    command: FlushCommand, hooks: Sequence[Hook], permissions: Permissions, workload: str
) -> Iterator[Receipt]:
    started_at, started = time.time(), time.perf_counter()
    result = ALLOCATORS.flush(command, hooks, permissions)
    seconds = time.perf_counter() - started
    for change in result.pools or (None,):
        outcome = result.outcome
        if change and outcome in ("freed", "partial", "nothing"):
            outcome = release_outcome(released_bytes(change), change.expected.low)
        yield Receipt(
            pid=os.getpid(),
            workload=workload,
            device_uuid=change.before.device_uuid if change else None,
            allocator=command.allocator or None,
            outcome=outcome,
            reason=result.reason,
            expected=change.expected if change else None,
            released_bytes=released_bytes(change) if change else 0,
            driver_released_bytes=None,
            before=pool_bytes(change.before) if change else None,
            after=pool_bytes(change.after) if change else None,
            steps=result.steps,
            raced=change.raced if change else False,
            requested_by="program",
            started_at=started_at,
            duration_seconds=seconds,
        )


def _relax_capture_mode() -> AbstractContextManager[None]:
    guards = capture_guards()
    return nullcontext() if guards is None else guards.relaxed_capture_mode()


def _delay_captures() -> AbstractContextManager[None]:
    guards = capture_guards()
    return nullcontext() if guards is None else guards.delayed_captures()


def read_all(adapters: Iterable[AdapterT], read: Callable[[AdapterT], Iterable[ResultT]]) -> list[ResultT]:
    """Return what all adapters return. One whose library fails, or is not understood, is left out."""
    results: list[ResultT] = []
    for adapter in adapters:
        try:
            results += read(adapter)
        except Exception:
            continue
    return results


def _read_pools(*adapters: AllocatorAdapter) -> list[PoolUsage]:
    return read_all(adapters, lambda adapter: adapter.read())


def check_limit(limit_bytes: object, device: object) -> None:
    """Raise TypeError or ValueError for wrong arguments."""
    if limit_bytes is not None and (not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool)):
        raise TypeError(f"limit: bytes: expected int, or None for no limit, got {type(limit_bytes).__name__}")
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit: bytes must be at least 1, or None for no limit, got {limit_bytes}")
    if device is not None and (not isinstance(device, (str, int)) or isinstance(device, bool)):
        raise TypeError(f"limit: device: expected a UUID, a number, or None for all, got {type(device).__name__}")


SET_LATER = "set the limit after its first allocation"


def apply_limit(limit_bytes: int | None, device: str | int | None, quota: str = "") -> tuple[AppliedLimit, ...]:
    """Set a limit at each allocator, and return the results. Never raises.

    Above it, allocators flush, then raise their out-of-memory error, as if the device were smaller. It applies to this
    process only, and frees nothing by itself. ``quota``: the quota that sets the limit, or, without
    ``limit_bytes``, whose limit is removed. The program's own limit remains if it is lower.
    """
    applied = tuple(
        result for adapter in ALLOCATORS.find_adapters() for result in _apply_limit(adapter, limit_bytes, device, quota)
    )
    if applied or quota:
        return applied
    uuid = device if isinstance(device, str) else None
    return (
        AppliedLimit("", uuid, limit_bytes, False, f"the program doesn't use a supported library yet; {SET_LATER}"),
    )


def _apply_limit(
    adapter: AllocatorAdapter, limit_bytes: int | None, device: str | int | None, quota: str
) -> Sequence[AppliedLimit]:
    own_limits = ALLOCATORS.own_limits(adapter) if quota else {}
    lower_limits = {
        uuid: size
        for uuid, size in own_limits.items()
        if device in (None, uuid) and (limit_bytes is None or size < limit_bytes)
    }
    devices: list[str | int | None] = [device]
    if lower_limits:
        devices = [
            uuid for uuid in {pool.device_uuid: None for pool in _read_pools(adapter)} if uuid not in lower_limits
        ]
    own_applied = [result for uuid, size in lower_limits.items() for result in _limit_allocator(adapter, size, uuid)]
    applied = [result for each in devices for result in _limit_allocator(adapter, limit_bytes, each)]
    ALLOCATORS.note_limits(own_applied, "")
    ALLOCATORS.note_limits(applied, quota)
    return own_applied + applied


def _limit_allocator(
    adapter: AllocatorAdapter, limit_bytes: int | None, device: str | int | None
) -> Sequence[AppliedLimit]:
    """Limit one allocator on one device, or on all devices (None)."""
    name, uuid = adapter.name, device if isinstance(device, str) else None
    try:
        applied = adapter.limit(limit_bytes, device)
    except FlushRefused as refusal:
        return (AppliedLimit(name, uuid, limit_bytes, False, printable_text(refusal)),)
    except Exception as error:  # an error of the library
        return (AppliedLimit(name, uuid, limit_bytes, False, printable_text(f"{type(error).__name__}: {error}")),)
    unused = f"{name} doesn't use {'a device' if device is None else 'this device'} yet; {SET_LATER}"
    return applied or (AppliedLimit(name, uuid, limit_bytes, False, unused),)
