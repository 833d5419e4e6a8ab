"""RMM's memory resources (25.04 and later), as the program has stacked them. They are only read here.

Live bytes are known from an adaptor that counts (Statistics, Tracking, Limiting; under ``gpumond run`` that of
`rmm_counting`), held bytes from a pool or the driver. A pool without such an adaptor is reported with unknown live
bytes; a plain resource without one isn't reported, since nothing shows whether the program allocates from it. Pools and
arenas of RMM return nothing until they are destroyed. A stream-ordered resource (CudaAsync) has its own memory pool in
the driver, which can be trimmed. RMM does not expose its handle; an allocation shows it. It is made for a flush or a
plan, and once when the program has allocated from the resource or, where nothing counts, has had it for some time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.agent import cuda
from gpumond.agent.adapters import AllocatorAdapter, Finishable, FlushRefused, RetentionReporting
from gpumond.agent.adapters.mempools import counter_of, is_counted
from gpumond.agent.adapters.python_owners import retained_by_trim
from gpumond.agent.adapters.rmm_counting import is_counting
from gpumond.agent.adapters.rmm_stack import (
    KNOWN_POOLS,
    Count,
    KnownPool,
    Stack,
    forget_pool,
    forget_pools,
    read_stack,
)
from gpumond.model.pools import Exactness, PoolUsage, Reclaimable, StepResult

PROBE_BYTES = 256
SETTLED_SECONDS = 10.0
"""Time after which a program has most probably allocated from its resource. The first allocation takes 32 MiB from the
driver, so that it is not the agent's.
"""


class RmmAdapter(AllocatorAdapter, Finishable, RetentionReporting):
    name = "rmm"

    def __init__(self, rmm: Any, settled_seconds: float = SETTLED_SECONDS) -> None:
        self._rmm, self._mr, self._settled_seconds = rmm, rmm.mr, settled_seconds
        self._counts: dict[int, Count] = {}
        self._first_seen: dict[int, tuple[int, float]] = {}
        """Identity of the stream-ordered resource of each device, and when it was first seen."""

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
        forget_pools()

    def _stacks(self) -> Iterator[tuple[int, Stack]]:
        """Yield the stacks of devices with a context. RMM would create a plain resource for any other device."""
        for ordinal in cuda.contexts():
            stack = read_stack(self._mr.get_per_device_resource(ordinal), self._counts.get(ordinal))
            forget_pool(ordinal, stack and stack.ordered)
            if stack is not None:
                if stack.count is not None:
                    self._counts[ordinal] = stack.count
                yield ordinal, stack

    def _usage(self, ordinal: int, stack: Stack, exact: bool) -> PoolUsage | None:
        probe = exact or (bool(stack.live) and is_counting(self._rmm)) or self._has_settled(ordinal, stack)
        uuid, pool = cuda.device_uuid(ordinal), self._pool(ordinal, stack, probe)
        shared = pool is not None and is_counted(ordinal, pool)
        amounts = cuda.pool_bytes(pool) if pool and not shared else None
        live = stack.live
        if live is None and amounts and not stack.caches:
            live = amounts[1]
        if uuid is None or (live is None and (stack.direct or shared)):
            return None
        held, reclaimable, known = _held(stack, live or 0, amounts)
        return PoolUsage(
            allocator="rmm",
            device_uuid=uuid,
            live_bytes=live,
            held_bytes=held,
            reclaimable=reclaimable,
            stranded_bytes=0 if live is None else held - live - reclaimable.likely,
            inside=counter_of(ordinal, pool) if pool and shared else None,
            peak_live_bytes=stack.peak_bytes,
            held_known=known,
            live_allocations=stack.live_allocations,
            managed=stack.managed,
        )

    def _has_settled(self, ordinal: int, stack: Stack) -> bool:
        if stack.ordered is None:
            return False
        resource, now = id(stack.ordered), time.monotonic()
        if self._first_seen.get(ordinal, (0, 0.0))[0] != resource:
            self._first_seen[ordinal] = resource, now
        return now - self._first_seen[ordinal][1] >= self._settled_seconds

    def _pool(self, ordinal: int, stack: Stack, probe: bool) -> int | None:
        """Return the handle of the driver's pool below the stack; ``probe`` permits an allocation to find it."""
        pool_handle = getattr(stack.ordered, "pool_handle", None)
        if pool_handle is not None:
            return int(pool_handle())
        if probe and stack.ordered is not None and ordinal not in KNOWN_POOLS and not cuda.capturing():
            KNOWN_POOLS[ordinal] = KnownPool(stack.ordered, _pool_of(ordinal, stack.ordered))
        known = KNOWN_POOLS.get(ordinal)
        return None if known is None else known.pool


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
    exactness: Exactness = "interval" if stack.ordered is not None else "not_releasable"
    held = live if stack.pool_bytes is None else max(stack.pool_bytes, live)
    return held, Reclaimable(0, 0, 0, exactness), stack.pool_bytes is not None


def _pool_of(ordinal: int, resource: Any) -> int | None:
    """Return the pool that an allocation of the resource comes from."""
    with cuda.current(ordinal) as ready:
        if not ready:
            return None
        pointer = resource.allocate(PROBE_BYTES)
        try:
            return cuda.pool_of(pointer)
        finally:
            resource.deallocate(pointer, PROBE_BYTES)
