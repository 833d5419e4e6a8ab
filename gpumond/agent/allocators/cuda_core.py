"""Device memory resources of cuda.core (1.0 and later) with a pool of their own in the driver.

cuda.core has no list of them. They are found among the objects that Python's garbage collector tracks, and kept as weak
references. A resource without options uses the device's current pool, which is the default one of `mempools` or belongs
to another library. Memory that another process exports is counted there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any
from weakref import ref

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.gil import gil_held, has_gil
from gpumond.agent.allocators.mempools import MAX_ALLOCATIONS, GuardedAdapter, caching_pool, find_instances, trim_pools
from gpumond.facts.pools import PoolUsage

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
"""Seconds between two searches for reports. The pause is doubled after each search that finds nothing new, and there is
none after the longest: a search stalls Python for some ten milliseconds.
"""

_resources: list[ref[Any]] = []
_next_search_at, _pause_seconds = 0.0, FIRST_PAUSE_SECONDS


class CudaCoreAdapter(GuardedAdapter):
    name = "cuda.core"
    flush_step = "trim"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        if exact:
            _search()
        else:
            _search_if_due()
        totals: dict[int, tuple[int, int]] = {}
        for ordinal, pool, _ in _pools():
            if (pool_bytes := cuda.mempool_bytes(pool)) and pool_bytes.reserved:
                reserved, used = totals.get(ordinal, (0, 0))
                totals[ordinal] = reserved + pool_bytes.reserved, used + pool_bytes.used
        return tuple(
            caching_pool("cuda.core", cuda.device_uuid(ordinal) or "", used, reserved)
            for ordinal, (reserved, used) in sorted(totals.items())
        )

    def release(self) -> tuple[int, str]:
        """Trim each pool. A resource sets the pool's threshold so that it keeps all memory."""
        return trim_pools((ordinal, pool) for ordinal, pool, _ in _pools())[0], ""


def adapter() -> CudaCoreAdapter | None:
    """Return None until the program has a resource with a pool of its own."""
    if sys.modules["cuda.core"].__version__.startswith("0.") or not cuda.devices_with_context():
        return None
    _search_if_due()
    return CudaCoreAdapter() if next(_pools(), None) else None


def owns(pool: int) -> bool:
    """Return whether a resource that is reported owns this pool."""
    return any(handle == pool for _, handle, _ in _pools())


def _search_if_due() -> None:
    if time.monotonic() >= _next_search_at:
        _search()


def _search() -> None:
    """Find the resources; in a program with very many objects, keep those found before."""
    global _resources, _next_search_at, _pause_seconds
    if sys.getallocatedblocks() > MAX_ALLOCATIONS or not has_gil():
        return
    cls = sys.modules["cuda.core"].DeviceMemoryResource
    types = {id(each) for each in (cls, *cls.__subclasses__())}
    with gil_held():
        resources = [ref(resource) for resource in find_instances(types)]
    _pause_seconds = 2 * _pause_seconds if len(resources) == len(_resources) else FIRST_PAUSE_SECONDS
    _resources, _next_search_at = (
        resources,
        time.monotonic() + _pause_seconds if _pause_seconds <= LONGEST_PAUSE_SECONDS else inf,
    )


def _pools() -> Iterator[tuple[int, int, Any]]:
    """Yield ordinal and handle of each pool, with an object that keeps it if the program closes its resource."""
    for reference in _resources:
        resource = reference()
        if resource is None or not resource.is_handle_owned or resource.is_mapped:
            continue
        try:
            keeper, pool = resource.attributes, int(resource.handle)
        except RuntimeError:  # closed by another thread
            continue
        if pool and cuda.has_context(resource.device_id):
            yield resource.device_id, pool, keeper
