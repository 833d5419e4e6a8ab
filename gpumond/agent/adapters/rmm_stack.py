"""Statistics of a stack of RMM's memory resources, from the one that the program allocates from to the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpumond.agent import cuda

CACHING = frozenset(("PoolMemoryResource", "ArenaMemoryResource", "FixedSizeMemoryResource", "BinningMemoryResource"))
ORDERED = frozenset(("CudaAsyncMemoryResource", "CudaAsyncViewMemoryResource"))
MANAGED = frozenset(("ManagedMemoryResource",))
DIRECT = frozenset(("CudaMemoryResource",))
"""Any other resource at the bottom is not, or not only, device memory: pinned or host memory."""

MAX_DEPTH = 32


class Count(NamedTuple):
    """The largest number of allocations that one adaptor has reported."""

    adaptor: int
    allocations: int


class KnownPool(NamedTuple):
    """The driver's pool of a resource, None if it has none. The handle is valid as long as the resource exists."""

    resource: Any
    pool: int | None


KNOWN_POOLS: dict[int, KnownPool] = {}
"""By the number of the device, of the current resources."""


def forget_pools() -> None:
    """Release the resources: the agent must not extend the lifetime of the program's objects."""
    for ordinal in list(KNOWN_POOLS):
        forget_pool(ordinal)


def forget_pool(ordinal: int, resource: Any = None) -> None:
    """Release the resource of a device unless it is this one."""
    known = KNOWN_POOLS.get(ordinal)
    if known is not None and known.resource is not resource:
        with cuda.current(ordinal):  # this may be the last reference, whose end frees memory
            KNOWN_POOLS.pop(ordinal, None)
            del known


@dataclass(frozen=True, slots=True)
class Stack:
    """The statistics of a stack.

    ``live``: bytes handed out by the whole stack, counted by the topmost adaptor; ``live_allocations``: number of these
    allocations, if that adaptor counts them. ``pool_bytes``: bytes that the lowest pool has taken from the resource
    below it. ``caches``: the stack contains a pool of RMM. ``ordered``: the stream-ordered resource at the bottom.
    ``managed``: that resource allocates managed memory.
    """

    live: int | None
    pool_bytes: int | None
    caches: bool
    ordered: Any
    count: Count | None = None
    peak_bytes: int | None = None
    live_allocations: int | None = None
    managed: bool = False

    @property
    def direct(self) -> bool:
        """True if freed bytes return to the driver at once."""
        return not self.caches and self.ordered is None


def read_stack(top: Any, before: Count | None = None) -> Stack | None:
    """Return the statistics; None if the memory is neither device nor managed memory.

    ``before``: the count of the previous call.
    A statistics adaptor has a stack of counters and reports the topmost: inside ``rmm.statistics.statistics()`` it
    reports only the allocations made there. It then reports fewer allocations than before, and its bytes are not used.
    """
    live = pool_bytes = peak = count = live_allocations = None
    caches = foreign = False
    resource = top
    for resource in _downwards(top):
        if _is(resource, CACHING):
            caches, foreign = True, foreign or _has_foreign_bins(resource)
            size = getattr(resource, "pool_size", None)
            pool_bytes = pool_bytes if size is None else int(size())
            continue
        counted, most, present, allocations = _count(resource)
        if allocations is not None and count is None:
            known = before.allocations if before is not None and before.adaptor == id(resource) else 0
            count = Count(id(resource), max(known, allocations))
            counted = counted if allocations >= known else None
        if counted is not None and caches:
            pool_bytes = counted
        elif counted is not None and live is None:
            live, peak, live_allocations = counted, most, present
    ordered = resource if _is(resource, ORDERED) else None
    managed = _is(resource, MANAGED)
    if ordered is None and not managed and not _is(resource, DIRECT):
        return None
    return Stack(live, None if foreign else pool_bytes, caches, ordered, count, peak, live_allocations, managed)


def _downwards(top: Any) -> Iterator[Any]:
    resource = top
    for _ in range(MAX_DEPTH):
        yield resource
        resource = getattr(resource, "upstream_mr", None)
        if resource is None:
            return


def _count(resource: Any) -> tuple[int | None, int | None, int | None, int | None]:
    """Return current bytes, peak bytes, and the number of current and of all allocations, as far as the resource counts
    them.
    """
    counts = getattr(resource, "allocation_counts", None)
    if counts is not None:
        return max(0, counts.current_bytes), counts.peak_bytes, max(0, counts.current_count), counts.total_count
    allocated_bytes = getattr(resource, "get_allocated_bytes", None)
    return (None if allocated_bytes is None else int(allocated_bytes())), None, None, None


def _has_foreign_bins(resource: Any) -> bool:
    """Return whether it also allocates from a resource that is not below it."""
    below = {id(one) for one in _downwards(resource)}
    return any(not below & {id(one) for one in _downwards(bin)} for bin in getattr(resource, "bin_mrs", ()))


def _is(resource: Any, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(resource).__mro__)
