"""RMM's memory resources (25.04 and later), as the program has stacked them. They are read, never replaced.

Live bytes are known from an adaptor that counts (Statistics, Tracking, Limiting), held bytes from a pool or the driver.
A stack without known live bytes is not reported. Pools and arenas of RMM return nothing until they are destroyed. A
stream-ordered resource (CudaAsync) has its own memory pool in the driver, which can be trimmed. RMM does not expose its
handle; an allocation shows it, and is made for a flush or a plan only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumond.agent import cuda
from gpumond.agent.adapters import AllocatorAdapter, Finishable, FlushRefused, RetentionReporting
from gpumond.agent.adapters.mempools import counter_of, is_counted
from gpumond.agent.adapters.python_owners import retained_by_trim
from gpumond.agent.adapters.rmm_stack import Count, Stack, read_stack
from gpumond.model.pools import PoolUsage, Reclaimable, StepResult

PROBE_BYTES = 256


class KnownPool(NamedTuple):
    """The driver's pool of a resource. The handle is valid as long as the resource exists."""

    resource: Any
    pool: int


class RmmAdapter(AllocatorAdapter, Finishable, RetentionReporting):
    name = "rmm"

    def __init__(self, rmm: Any) -> None:
        self._rmm, self._mr = rmm, rmm.mr
        self._counts: dict[int, Count] = {}
        self._known: dict[int, KnownPool] = {}

    def framework(self) -> str:
        return f"rmm {self._rmm.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        found = (self._usage(ordinal, stack, exact) for ordinal, stack in self._stacks())
        return tuple(usage for usage in found if usage is not None)

    def retained_bytes(self) -> Mapping[str, int]:
        pools = ((ordinal, self._pool(ordinal, stack, True)) for ordinal, stack in self._stacks() if not stack.caches)
        amounts = ((ordinal, cuda.pool_bytes(pool)) for ordinal, pool in pools if pool is not None)
        return retained_by_trim((ordinal, found[1]) for ordinal, found in amounts if found)

    def check(self) -> None:
        if reason := cuda.refusal():
            raise FlushRefused(reason)

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Trim the pools of stream-ordered resources when their device is idle."""
        self.check()
        if "trim" not in steps:
            return ()
        started, released, trimmed = time.perf_counter(), 0, 0
        for ordinal, stack in list(self._stacks()):
            pool = self._pool(ordinal, stack, probe=True)
            before = cuda.pool_bytes(pool) if pool else None
            if pool and before and cuda.trim(ordinal, pool):
                after = cuda.pool_bytes(pool)
                released, trimmed = released + (before[0] - after[0] if after else 0), trimmed + 1
        detail = "" if trimmed else "RMM keeps the memory of these resources until they are destroyed"
        return (StepResult("trim", max(0, released), time.perf_counter() - started, detail),)

    def finish(self) -> None:
        """Release the resources: the adapter must not extend the lifetime of the program's objects."""
        for ordinal in list(self._known):
            self._forget(ordinal)

    def _stacks(self) -> Iterator[tuple[int, Stack]]:
        """Yield the stacks of devices with a context. RMM would create a plain resource for any other device."""
        for ordinal in cuda.contexts():
            stack = read_stack(self._mr.get_per_device_resource(ordinal), self._counts.get(ordinal))
            self._forget(ordinal, stack and stack.ordered)
            if stack is not None:
                if stack.count is not None:
                    self._counts[ordinal] = stack.count
                yield ordinal, stack

    def _usage(self, ordinal: int, stack: Stack, probe: bool) -> PoolUsage | None:
        uuid, pool = cuda.device_uuid(ordinal), self._pool(ordinal, stack, probe)
        shared = pool is not None and is_counted(ordinal, pool)
        amounts = cuda.pool_bytes(pool) if pool and not shared else None
        live = stack.live
        if live is None and amounts and not stack.caches:
            live = amounts[1]
        if uuid is None or live is None:
            return None
        held, reclaimable, known = _held(stack, live, amounts)
        return PoolUsage(
            allocator="rmm",
            device_uuid=uuid,
            live_bytes=live,
            held_bytes=held,
            reclaimable=reclaimable,
            stranded_bytes=held - live - reclaimable.likely,
            inside=counter_of(ordinal, pool) if pool and shared else None,
            peak_live_bytes=stack.peak_bytes,
            held_known=known,
            live_allocations=stack.live_allocations,
        )

    def _pool(self, ordinal: int, stack: Stack, probe: bool) -> int | None:
        """Return the handle of the driver's pool below the stack; ``probe`` permits an allocation to find it."""
        pool_handle = getattr(stack.ordered, "pool_handle", None)
        if pool_handle is not None:
            return int(pool_handle())
        if probe and stack.ordered is not None and ordinal not in self._known:
            pool = _pool_of(ordinal, stack.ordered)
            if pool is not None:
                self._known[ordinal] = KnownPool(stack.ordered, pool)
        known = self._known.get(ordinal)
        return None if known is None else known.pool

    def _forget(self, ordinal: int, resource: Any = None) -> None:
        """Release any resource other than this one."""
        known = self._known.get(ordinal)
        if known is not None and known.resource is not resource:
            with cuda.current(ordinal):  # this may be the last reference, whose end frees memory
                del self._known[ordinal], known


def adapter() -> RmmAdapter:
    return RmmAdapter(sys.modules["rmm"])


def _held(stack: Stack, live: int, amounts: tuple[int, int] | None) -> tuple[int, Reclaimable, bool]:
    """Return held bytes, what a flush returns, and whether both are known. ``amounts``: of the driver's pool."""
    if stack.direct:
        return live, Reclaimable(0, 0, 0, "exact"), True
    if amounts:
        held = max(amounts[0], live)
        free = held - max(amounts[1], live)
        return held, Reclaimable(0, free, free if stack.caches else held - live, "interval"), True
    if stack.ordered is not None:
        return live, Reclaimable(0, 0, 0, "interval"), False
    if stack.pool_bytes is not None:
        return max(stack.pool_bytes, live), Reclaimable(0, 0, 0, "not_releasable"), True
    return live, Reclaimable(0, 0, 0, "not_releasable"), False


def _pool_of(ordinal: int, resource: Any) -> int | None:
    """Return the pool that an allocation of the resource comes from."""
    if cuda.capturing():
        return None
    with cuda.current(ordinal) as ready:
        if not ready:
            return None
        pointer = resource.allocate(PROBE_BYTES)
        try:
            return cuda.pool_of(pointer)
        finally:
            resource.deallocate(pointer, PROBE_BYTES)
