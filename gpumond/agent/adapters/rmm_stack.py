"""What a stack of RMM's memory resources tells, from the one that the program allocates from down to the driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

CACHING = frozenset(("PoolMemoryResource", "ArenaMemoryResource", "FixedSizeMemoryResource", "BinningMemoryResource"))
ORDERED = frozenset(("CudaAsyncMemoryResource", "CudaAsyncViewMemoryResource"))
DIRECT = frozenset(("CudaMemoryResource",))
"""Every other resource at the bottom is not, or not only, memory of the device: managed, pinned, the system's."""

MAX_DEPTH = 32


class Count(NamedTuple):
    """The most allocations that one adaptor has told of so far."""

    adaptor: int
    allocations: int


@dataclass(frozen=True, slots=True)
class Stack:
    """``live``: handed out by the whole stack, as the topmost adaptor counts. ``pool_bytes``: what the lowest pool
    has taken from what is below it. ``caches``: there is a pool of RMM's in it. ``ordered``: the stream-ordered
    resource at the bottom."""

    live: int | None
    pool_bytes: int | None
    caches: bool
    ordered: Any
    count: Count | None = None
    peak_bytes: int | None = None

    @property
    def direct(self) -> bool:
        """What is freed goes back to the driver at once."""
        return not self.caches and self.ordered is None


def look(top: Any, before: Count | None = None) -> Stack | None:
    """None if the memory is not the device's. ``before``: the count of the last look.

    Statistics has a stack of counters, and tells the topmost: inside ``rmm.statistics.statistics()`` it tells only
    what was allocated there. It then tells of fewer allocations than before, and its bytes are not believed.
    """
    live = pool_bytes = peak = count = None
    caches = foreign = False
    resource = top
    for resource in _downwards(top):
        if _is(resource, CACHING):
            caches, foreign = True, foreign or _has_foreign_bins(resource)
            size = getattr(resource, "pool_size", None)
            pool_bytes = pool_bytes if size is None else int(size())
            continue
        told, most, allocations = _count(resource)
        if allocations is not None and count is None:
            known = before.allocations if before is not None and before.adaptor == id(resource) else 0
            count = Count(id(resource), max(known, allocations))
            told = told if allocations >= known else None
        if told is not None and caches:
            pool_bytes = told
        elif told is not None and live is None:
            live, peak = told, most
    ordered = resource if _is(resource, ORDERED) else None
    if ordered is None and not _is(resource, DIRECT):
        return None
    return Stack(live, None if foreign else pool_bytes, caches, ordered, count, peak)


def _downwards(top: Any) -> Iterator[Any]:
    resource = top
    for _ in range(MAX_DEPTH):
        yield resource
        resource = getattr(resource, "upstream_mr", None)
        if resource is None:
            return


def _count(resource: Any) -> tuple[int | None, int | None, int | None]:
    """Bytes now, at their peak, and allocations in all, as far as the resource counts them."""
    counts = getattr(resource, "allocation_counts", None)
    if counts is not None:
        return max(0, counts.current_bytes), counts.peak_bytes, counts.total_count
    tell = getattr(resource, "get_allocated_bytes", None)
    return (None if tell is None else int(tell())), None, None


def _has_foreign_bins(resource: Any) -> bool:
    """Whether it also allocates from a resource that is not below it."""
    below = {id(one) for one in _downwards(resource)}
    return any(not below & {id(one) for one in _downwards(bin)} for bin in getattr(resource, "bin_mrs", ()))


def _is(resource: Any, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(resource).__mro__)
