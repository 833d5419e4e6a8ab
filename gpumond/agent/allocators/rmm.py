"""RMM's memory resources (25.04 and later), as the program has stacked them. They are only read here.

Live bytes are known from an adaptor that counts (Statistics, Tracking, Limiting; under ``gpumond run`` that of
`start_counting`), held bytes from a pool or the driver. A pool without such an adaptor is reported with unknown live
bytes; a plain resource without one isn't reported, since nothing shows whether the program allocates from it. Pools and
arenas of RMM return nothing until they are destroyed. A stream-ordered resource (CudaAsync) has its own memory pool in
the driver, which can be trimmed. RMM does not expose its handle; an allocation shows it. It is made for a flush or a
plan, and once when the program has allocated from the resource or, where nothing counts, has had it for some time.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.mempools import (
    GuardedAdapter,
    allocator_counting_pool,
    bytes_left_by_trim,
    has_counting_allocator,
    trim_pools,
)
from gpumond.facts.pools import Exactness, PoolUsage, Reclaimable

PROBE_BYTES = 256
SETTLED_SECONDS = 10.0
"""Time after which a program has most probably allocated from its resource. The first allocation takes 32 MiB from the
driver, so it is not the agent's.
"""


class RmmAdapter(GuardedAdapter):
    name = "rmm"
    flush_step = "trim"

    def __init__(self, rmm: Any, settled_seconds: float = SETTLED_SECONDS) -> None:
        self._rmm, self._mr, self._settled_seconds = rmm, rmm.mr, settled_seconds
        self._peak_counts: dict[int, PeakAllocations] = {}
        self._first_seen: dict[int, tuple[int, float]] = {}
        """Identity of the stream-ordered resource of each device, and when it was first seen."""

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        usages = (self._usage(ordinal, stack, exact) for ordinal, stack in self._stacks())
        return tuple(usage for usage in usages if usage is not None)

    def bytes_left_by_flush(self) -> Mapping[str, int]:
        pools = (
            (ordinal, self._driver_pool(ordinal, stack, True))
            for ordinal, stack in self._stacks()
            if not stack.has_pool
        )
        return bytes_left_by_trim(
            (ordinal, pool_bytes.used)
            for ordinal, pool in pools
            if pool is not None and (pool_bytes := cuda.mempool_bytes(pool))
        )

    def release(self) -> tuple[int, str]:
        """Trim the pools of stream-ordered resources."""
        stacks = list(self._stacks())
        pools = ((ordinal, self._driver_pool(ordinal, stack, may_probe=True)) for ordinal, stack in stacks)
        released, trimmed = trim_pools((ordinal, pool) for ordinal, pool in pools if pool)
        return released, "" if trimmed else "RMM keeps the memory of these resources until they are destroyed"

    def discard_exact_state(self) -> None:
        forget_pools()

    def _stacks(self) -> Iterator[tuple[int, ResourceStack]]:
        """Yield the stacks of devices with a context. RMM would create a plain resource for any other device."""
        for ordinal in cuda.devices_with_context():
            stack = read_resource_stack(self._mr.get_per_device_resource(ordinal), self._peak_counts.get(ordinal))
            forget_pool(ordinal, stack and stack.stream_ordered)
            if stack is not None:
                if stack.peak_count is not None:
                    self._peak_counts[ordinal] = stack.peak_count
                yield ordinal, stack

    def _usage(self, ordinal: int, stack: ResourceStack, exact: bool) -> PoolUsage | None:
        may_probe = exact or (bool(stack.live_bytes) and is_counting(self._rmm)) or self._has_settled(ordinal, stack)
        uuid, pool = cuda.device_uuid(ordinal), self._driver_pool(ordinal, stack, may_probe)
        is_shared = pool is not None and has_counting_allocator(ordinal, pool)
        driver_bytes = cuda.mempool_bytes(pool) if pool and not is_shared else None
        live_bytes = stack.live_bytes
        if live_bytes is None and driver_bytes and not stack.has_pool:
            live_bytes = driver_bytes.used
        if uuid is None or (live_bytes is None and (stack.is_direct or is_shared)):
            return None
        held, reclaimable, is_held_known = _held(stack, live_bytes or 0, driver_bytes)
        return PoolUsage(
            allocator="rmm",
            device_uuid=uuid,
            live_bytes=live_bytes,
            held_bytes=held,
            reclaimable=reclaimable,
            stranded_bytes=0 if live_bytes is None else held - live_bytes - reclaimable.likely,
            inside=allocator_counting_pool(ordinal, pool) if pool and is_shared else None,
            peak_live_bytes=stack.peak_bytes,
            held_known=is_held_known,
            live_allocations=stack.live_allocations,
            managed=stack.is_managed,
        )

    def _has_settled(self, ordinal: int, stack: ResourceStack) -> bool:
        if stack.stream_ordered is None:
            return False
        resource, now = id(stack.stream_ordered), time.monotonic()
        if self._first_seen.get(ordinal, (0, 0.0))[0] != resource:
            self._first_seen[ordinal] = resource, now
        return now - self._first_seen[ordinal][1] >= self._settled_seconds

    def _driver_pool(self, ordinal: int, stack: ResourceStack, may_probe: bool) -> int | None:
        """Return the handle of the driver's pool below the stack; ``may_probe`` permits an allocation to find it."""
        pool_handle = getattr(stack.stream_ordered, "pool_handle", None)
        if pool_handle is not None:
            return int(pool_handle())
        if may_probe and stack.stream_ordered is not None and ordinal not in DRIVER_POOLS and not cuda.is_capturing():
            DRIVER_POOLS[ordinal] = DriverPool(stack.stream_ordered, _find_driver_pool(ordinal, stack.stream_ordered))
        driver_pool = DRIVER_POOLS.get(ordinal)
        return None if driver_pool is None else driver_pool.pool


def adapter() -> RmmAdapter:
    return RmmAdapter(sys.modules["rmm"])


def _held(
    stack: ResourceStack, live_bytes: int, driver_bytes: cuda.MempoolBytes | None
) -> tuple[int, Reclaimable, bool]:
    """Return held bytes, what a flush returns, and whether both are known. ``driver_bytes``: of the driver's pool."""
    if stack.is_direct:
        return live_bytes, Reclaimable(0, 0, 0, "exact"), True
    if driver_bytes:
        held = max(driver_bytes.reserved, live_bytes)
        free = held - max(driver_bytes.used, live_bytes)
        return held, Reclaimable(0, free, free if stack.has_pool else held - live_bytes, "interval"), True
    exactness: Exactness = "interval" if stack.stream_ordered is not None else "not_releasable"
    held = live_bytes if stack.pool_bytes is None else max(stack.pool_bytes, live_bytes)
    return held, Reclaimable(0, 0, 0, exactness), stack.pool_bytes is not None


def _find_driver_pool(ordinal: int, resource: Any) -> int | None:
    """Return the pool that an allocation of the resource comes from."""
    with cuda.current_context(ordinal) as ready:
        if not ready:
            return None
        pointer = resource.allocate(PROBE_BYTES)
        try:
            return cuda.mempool_of(pointer)
        finally:
            resource.deallocate(pointer, PROBE_BYTES)


POOL_CLASSES = frozenset(
    ("PoolMemoryResource", "ArenaMemoryResource", "FixedSizeMemoryResource", "BinningMemoryResource")
)
STREAM_ORDERED_CLASSES = frozenset(("CudaAsyncMemoryResource", "CudaAsyncViewMemoryResource"))
MANAGED_CLASSES = frozenset(("ManagedMemoryResource",))
DIRECT_CLASSES = frozenset(("CudaMemoryResource",))
"""Any other resource at the bottom is not, or not only, device memory: pinned or host memory."""

MAX_STACK_DEPTH = 32


class PeakAllocations(NamedTuple):
    """The largest number of allocations that one adaptor has reported."""

    adaptor: int
    allocations: int


class DriverPool(NamedTuple):
    """The driver's pool of a resource, None if it has none. The handle is valid as long as the resource exists."""

    resource: Any
    pool: int | None


DRIVER_POOLS: dict[int, DriverPool] = {}
"""By the number of the device, of the current resources."""


def forget_pools() -> None:
    """Release the resources: the agent must not extend the lifetime of the program's objects."""
    for ordinal in list(DRIVER_POOLS):
        forget_pool(ordinal)


def forget_pool(ordinal: int, resource: Any = None) -> None:
    """Release the resource of a device unless it is this one."""
    driver_pool = DRIVER_POOLS.get(ordinal)
    if driver_pool is not None and driver_pool.resource is not resource:
        with cuda.current_context(ordinal):  # this may be the last reference, whose end frees memory
            DRIVER_POOLS.pop(ordinal, None)
            del driver_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStack:
    """The statistics of a stack.

    ``live_bytes``: bytes handed out by the whole stack, counted by the topmost adaptor; ``live_allocations``: number of
    these allocations, if that adaptor counts them. ``pool_bytes``: bytes that the lowest pool has taken from the
    resource below it. ``has_pool``: the stack contains a pool of RMM. ``stream_ordered``: the stream-ordered resource
    at the bottom. ``is_managed``: the resource at the bottom allocates managed memory.
    """

    live_bytes: int | None
    pool_bytes: int | None
    has_pool: bool
    stream_ordered: Any
    peak_count: PeakAllocations | None
    peak_bytes: int | None
    live_allocations: int | None
    is_managed: bool

    @property
    def is_direct(self) -> bool:
        """True if freed bytes return to the driver at once."""
        return not self.has_pool and self.stream_ordered is None


def read_resource_stack(top: Any, before: PeakAllocations | None = None) -> ResourceStack | None:
    """Return the statistics; None if the memory is neither device nor managed memory.

    ``before``: the count of the previous call.
    A statistics adaptor has a stack of counters and reports the topmost: inside ``rmm.statistics.statistics()`` it
    reports only the allocations made there. It then reports fewer allocations than before, and its bytes are not used.
    """
    live_bytes = pool_bytes = peak_bytes = peak_count = live_allocations = None
    has_pool = has_foreign_bins = False
    resource = top
    for resource in _walk_down(top):
        if _is_instance(resource, POOL_CLASSES):
            has_pool, has_foreign_bins = True, has_foreign_bins or _has_foreign_bins(resource)
            size = getattr(resource, "pool_size", None)
            pool_bytes = pool_bytes if size is None else int(size())
            continue
        counts = _allocation_counts(resource)
        current_bytes = counts.current_bytes
        if counts.all_allocations is not None and peak_count is None:
            previous = before.allocations if before is not None and before.adaptor == id(resource) else 0
            peak_count = PeakAllocations(id(resource), max(previous, counts.all_allocations))
            current_bytes = current_bytes if counts.all_allocations >= previous else None
        if current_bytes is not None and has_pool:
            pool_bytes = current_bytes
        elif current_bytes is not None and live_bytes is None:
            live_bytes, peak_bytes, live_allocations = current_bytes, counts.peak_bytes, counts.current_allocations
    stream_ordered = resource if _is_instance(resource, STREAM_ORDERED_CLASSES) else None
    is_managed = _is_instance(resource, MANAGED_CLASSES)
    if stream_ordered is None and not is_managed and not _is_instance(resource, DIRECT_CLASSES):
        return None
    return ResourceStack(
        live_bytes=live_bytes,
        pool_bytes=None if has_foreign_bins else pool_bytes,
        has_pool=has_pool,
        stream_ordered=stream_ordered,
        peak_count=peak_count,
        peak_bytes=peak_bytes,
        live_allocations=live_allocations,
        is_managed=is_managed,
    )


def _walk_down(top: Any) -> Iterator[Any]:
    resource = top
    for _ in range(MAX_STACK_DEPTH):
        yield resource
        resource = getattr(resource, "upstream_mr", None)
        if resource is None:
            return


class AllocationCounts(NamedTuple):
    """What one resource has counted; None for what it does not count."""

    current_bytes: int | None
    peak_bytes: int | None = None
    current_allocations: int | None = None
    all_allocations: int | None = None


def _allocation_counts(resource: Any) -> AllocationCounts:
    counts = getattr(resource, "allocation_counts", None)
    if counts is not None:
        return AllocationCounts(
            max(0, counts.current_bytes), counts.peak_bytes, max(0, counts.current_count), counts.total_count
        )
    allocated_bytes = getattr(resource, "get_allocated_bytes", None)
    return AllocationCounts(None if allocated_bytes is None else int(allocated_bytes()))


def _has_foreign_bins(resource: Any) -> bool:
    """Return whether it also allocates from a resource that is not below it."""
    below = {id(each) for each in _walk_down(resource)}
    return any(not below & {id(each) for each in _walk_down(bin)} for bin in getattr(resource, "bin_mrs", ()))


def _is_instance(resource: Any, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(resource).__mro__)


SETTER_NAMES = ("set_current_device_resource", "set_per_device_resource", "reinitialize")
MODULE_NAMES = (
    "rmm",
    "rmm.rmm",
    "rmm.mr",
    "rmm.pylibrmm.memory_resource",
    "rmm.pylibrmm.memory_resource._memory_resource",
)
"""All modules of RMM that have these functions as attributes."""


def start_counting(rmm: Any) -> None:
    """Count what the program allocates through RMM from now on. To be called before it uses RMM."""
    mr = rmm.mr
    if is_counting(rmm):
        return
    get, set_of_device, set_current = (
        mr.get_per_device_resource,
        mr.set_per_device_resource,
        mr.set_current_device_resource,
    )
    reset = rmm.reinitialize
    adaptors = _Adaptors(mr)

    @functools.wraps(set_of_device)
    def set_per_device_resource(device: int, mr: Any) -> Any:
        return set_of_device(device, adaptors.with_adaptor(mr))

    @functools.wraps(set_current)
    def set_current_device_resource(mr: Any) -> Any:
        return set_current(adaptors.with_adaptor(mr))

    @functools.wraps(reset)
    def reinitialize(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            forget_pools()
        result = reset(*args, **kwargs)
        with suppress(Exception):
            for device in mr.get_log_filenames():  # those that have a resource
                set_of_device(device, adaptors.with_adaptor(get(device)))
        return result

    _replace({set_of_device: set_per_device_resource, set_current: set_current_device_resource, reset: reinitialize})
    # RMM would create this resource by itself when the program first uses the device.
    set_of_device(0, adaptors.with_adaptor(mr.CudaMemoryResource()))


def is_counting(rmm: Any) -> bool:
    return hasattr(rmm.mr.set_per_device_resource, "gpumond")


class _Adaptors:
    """The adaptors that this module has created, as long as the program or RMM uses them."""

    def __init__(self, mr: Any) -> None:
        self._in_use: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._counting_class: Any = _transparent_class(mr.StatisticsResourceAdaptor)
        self._logging = getattr(mr, "LoggingResourceAdaptor", ())
        callback: Any = getattr(mr, "FailureCallbackResourceAdaptor", None)
        borrows = os.environ.get("GPUMOND_BORROW") == "1" and callback is not None
        self._borrowing_class: Any = _transparent_class(callback) if borrows else None

    def with_adaptor(self, resource: Any) -> Any:
        """Return the resource with an adaptor on top, and the same adaptor for the same resource.

        Return the resource itself if its stack counts already, if it isn't device memory, or if RMM looks for an
        adaptor of this kind on top of the stack.
        """
        try:
            forget_pools()  # the program replaces a resource
            if isinstance(resource, self._logging):
                return resource
            stack = read_resource_stack(resource)
            if stack is None or stack.live_bytes is not None or stack.peak_count is not None:
                return resource
            adaptor = self._in_use.get(id(resource))
            if adaptor is None:
                below = resource if self._borrowing_class is None else self._borrowing_class(resource, borrow)
                adaptor = self._in_use[id(resource)] = self._counting_class(below)
            return adaptor
        except Exception:  # RMM itself tells the program what is wrong with its resource
            return resource


def borrow(size_bytes: int) -> bool:
    """Ask the daemon for room after a failed allocation; True if it released memory, and RMM may try again."""
    try:
        from gpumond.agent.allocators.borrowing import BORROWING  # needed after an error only

        ordinals = cuda.devices_with_context()
        device = cuda.device_uuid(ordinals[0]) if len(ordinals) == 1 else None
        answer = BORROWING.request(device, size_bytes)
        return answer is not None and answer.released_bytes > 0
    except Exception:  # RMM raises the program's own error
        return False


def _transparent_class(base: Any) -> type:
    """Return a class of adaptors that have the attributes of the resource below them, and pass for its class."""

    class TransparentAdaptor(base):  # type: ignore[misc]
        """Counts the bytes that the program allocates, or borrows. `upstream_mr` is the resource below."""

        __class__ = property(lambda self: self.upstream_mr.__class__)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.upstream_mr, name)

    return TransparentAdaptor


def _replace(functions: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    for new in functions.values():
        new.gpumond = True  # type: ignore[attr-defined]
    for module in filter(None, map(sys.modules.get, MODULE_NAMES)):
        for name in SETTER_NAMES:
            old = getattr(module, name, None)
            if old in functions:
                setattr(module, name, functions[old])
