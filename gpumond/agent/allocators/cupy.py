"""CuPy's memory pools (12 and later).

A pool reports about the current device only, and making a device current creates a context on it. So only devices with
a context are visited, and the calling thread keeps its current device. Pinned host memory is not reported: CuPy's pool
counts its blocks, not its bytes.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.mempools import GuardedAdapter, bytes_left_by_trim, has_counting_allocator
from gpumond.facts.pools import PoolUsage, Reclaimable, StepResult
from gpumond.facts.program import AppliedLimit
from gpumond.facts.units import plural

ResultT = TypeVar("ResultT")


class CupyAdapter(GuardedAdapter):
    """Reads the default pool, and the pool in use if it is another pool of CuPy.

    If CuPy allocates through the function of another library without a pool of its own, it has nothing to report: the
    other library counts these bytes.
    """

    name = "cupy"
    main_thread_steps = frozenset(("plans",))
    """Each thread has its own cache of cuFFT plans."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._own_limits: dict[int, int] = {}
        """The program's own limits on the devices that were limited."""
        streams = getattr(getattr(cupy.cuda, "stream", None), "_BaseStream", None)
        if streams is not None:
            cuda.watch_captures(streams, "begin_capture", "end_capture")

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        pools = self._pools()
        usages = visit_devices(
            self._cupy, cuda.devices_with_context(), lambda ordinal: self._usage(ordinal, pools, exact)
        )
        return tuple(usage for usage in usages if usage is not None)

    def bytes_left_by_flush(self) -> Mapping[str, int]:
        pools = [pool for pool in self._pools() if _is_async(pool)]
        handles = (
            (ordinal, pool._pools[ordinal])
            for ordinal in cuda.devices_with_context()
            for pool in pools
            if self._upstream_allocator(pool, ordinal) is not None
        )
        return bytes_left_by_trim(
            (ordinal, pool_bytes.used) for ordinal, handle in handles if (pool_bytes := cuda.mempool_bytes(handle))
        )

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Free whole chunks with cudaFree. The stream-ordered pool first waits until the device is idle."""
        self.check()
        ordinals = cuda.devices_with_context()
        plans = self._clear_plans(ordinals) if "plans" in steps else ()
        if "cache" not in steps:
            return plans
        pools = self._pools()

        def free(ordinal: int) -> int:
            counted = [pool for pool in pools if self._upstream_allocator(pool, ordinal) is not None]
            held = sum(int(pool.total_bytes()) for pool in counted)
            for pool in counted:
                if _is_async(pool):
                    self._cupy.cuda.runtime.deviceSynchronize()
                pool.free_all_blocks()
            return held - sum(int(pool.total_bytes()) for pool in counted)

        started = time.perf_counter()
        released = sum(visit_devices(self._cupy, ordinals, free))
        return (*plans, StepResult("cache", max(0, released), time.perf_counter() - started))

    def _clear_plans(self, ordinals: Sequence[int]) -> Sequence[StepResult]:
        """Clear this thread's cuFFT plans on its current device. Their work areas are blocks of the pool."""
        cache = sys.modules.get("cupy.fft._cache")
        if cache is None or self._cupy.cuda.runtime.getDevice() not in ordinals:
            return ()
        if cuda.CAPTURED_GRAPHS:
            raise FlushRefused("a captured CUDA graph may use a cuFFT plan")
        started, plans = time.perf_counter(), cache.get_plan_cache().get_curr_size()
        cache.clear_plan_cache()
        return (StepResult("plans", 0, time.perf_counter() - started, plural(plans, "cuFFT plan")),)

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """Limit each pool on each device with a live context; without a limit, the program's own one applies."""
        pools = [pool for pool in self._pools() if not _is_async(pool)]
        ordinals = cuda.devices_with_context()
        selected = [ordinal for ordinal in ordinals if device in (None, ordinal, cuda.device_uuid(ordinal))]
        if not pools:
            raise FlushRefused("CuPy's stream-ordered pool can't be limited")

        def limit(ordinal: int) -> AppliedLimit:
            own_limit = self._own_limits.setdefault(ordinal, self._own_limit(ordinal, pools))
            for pool in pools:
                pool.set_limit(size=limit_bytes or own_limit)
            return AppliedLimit("cupy", cuda.device_uuid(ordinal), limit_bytes, True)

        return visit_devices(self._cupy, selected, limit)

    def own_limits(self) -> Mapping[str, int]:
        pools = [pool for pool in self._pools() if not _is_async(pool)]
        ordinals = cuda.devices_with_context()
        limits = visit_devices(self._cupy, ordinals, lambda ordinal: self._own_limit(ordinal, pools))
        uuids = map(cuda.device_uuid, ordinals)
        return {uuid: size for uuid, size in zip(uuids, limits, strict=True) if size and uuid is not None}

    def _own_limit(self, ordinal: int, pools: Iterable[Any]) -> int:
        """Return the lowest limit that the program has set on the current device; 0 means no limit to CuPy."""
        if ordinal in self._own_limits:
            return self._own_limits[ordinal]
        return min((size for pool in pools if (size := int(pool.get_limit()))), default=0)

    def _pools(self) -> list[Any]:
        default = self._cupy.get_default_memory_pool()
        used_pool = getattr(self._cupy.cuda.get_allocator(), "__self__", None)
        pool_classes = (self._cupy.cuda.MemoryPool, self._cupy.cuda.MemoryAsyncPool)
        return [default] if used_pool is default or not isinstance(used_pool, pool_classes) else [default, used_pool]

    def _upstream_allocator(self, pool: Any, ordinal: int) -> str | None:
        """Return the allocator that the pool takes its memory from, "" for the driver; None if it must not be counted.

        A stream-ordered pool belongs to the driver: its default pool, and one of cuda.core, is counted as such,
        whichever library uses it. Another pool may use any function, which since CuPy 14 is among the objects that the
        pool refers to. An unknown function may allocate memory of another library, or memory that is not on the device.
        """
        if _is_async(pool):
            handles = getattr(pool, "_pools", None)
            return "" if handles and not has_counting_allocator(ordinal, handles[ordinal]) else None
        if pool is self._cupy.get_default_memory_pool() or _allocates_by(pool, "cupy.cuda.memory", "_malloc"):
            return ""
        return "rmm" if _allocates_by(pool, "rmm.allocators.cupy", "rmm_cupy_allocator") else None

    def _usage(self, ordinal: int, pools: Iterable[Any], exact: bool) -> PoolUsage | None:
        """Return all pools of one device together. It must be the current device."""
        uuid = cuda.device_uuid(ordinal)
        pools_by_upstream: dict[str | None, list[Any]] = {}
        for pool in pools:
            pools_by_upstream.setdefault(self._upstream_allocator(pool, ordinal), []).append(pool)
        for upstream in ("", "rmm"):
            live = free = low = high = 0
            for pool in pools_by_upstream.get(upstream, ()):
                used_bytes, total = int(pool.used_bytes()), int(pool.total_bytes())
                free_bytes = max(0, total - used_bytes)
                flushable = _flushable_bytes(pool, ordinal, used_bytes, free_bytes, exact)
                live, free = live + used_bytes, free + free_bytes
                low, high = low + (flushable or 0), high + (free_bytes if flushable is None else flushable)
            if uuid is not None and live + free:
                reclaimable = Reclaimable(low, high, high, "exact" if low == high else "interval")
                return PoolUsage(
                    allocator="cupy",
                    device_uuid=uuid,
                    live_bytes=live,
                    held_bytes=live + free,
                    reclaimable=reclaimable,
                    stranded_bytes=free - high,
                    inside=upstream or None,
                )
        return None


def visit_devices(cupy: Any, ordinals: Sequence[int], visit: Callable[[int], ResultT]) -> list[ResultT]:
    """Call ``visit`` for each device while that device is current."""
    runtime = cupy.cuda.runtime

    def visit_current(ordinal: int) -> ResultT:
        runtime.setDevice(ordinal)
        return visit(ordinal)

    def visit_in_thread(ordinal: int) -> ResultT:
        with cuda.relaxed_capture_mode():
            return visit_current(ordinal)

    if not ordinals:
        return []
    previous = runtime.getDevice()
    if previous in ordinals:
        try:
            return [visit_current(ordinal) for ordinal in ordinals]
        finally:
            runtime.setDevice(previous)
    # Returning to a device without a context would create one. A temporary thread need not return.
    with ThreadPoolExecutor(1, "gpumond-cupy") as thread:
        return list(thread.map(visit_in_thread, ordinals))


def managed_pool(cupy: Any) -> Any:
    """Return the pool in use if it consists of managed memory, else None."""
    used_pool = getattr(cupy.cuda.get_allocator(), "__self__", None)
    is_managed = isinstance(used_pool, cupy.cuda.MemoryPool) and _allocates_by(
        used_pool, "cupy.cuda.memory", "malloc_managed"
    )
    return used_pool if is_managed else None


def _allocates_by(pool: Any, module: str, name: str) -> bool:
    """Return whether a pool has this function as its allocator, as far as it is visible."""
    return any(
        getattr(function, "__name__", None) == name and getattr(function, "__module__", None) == module
        for function in gc.get_referents(pool)
    )


def adapter() -> CupyAdapter:
    return CupyAdapter(sys.modules["cupy"])


def _is_async(pool: Any) -> bool:
    return type(pool).__name__ == "MemoryAsyncPool"


def _flushable_bytes(pool: Any, ordinal: int, used_bytes: int, free_bytes: int, exact: bool) -> int | None:
    """Return the idle bytes that a flush returns: all if nothing is in use. None if only bounds are known."""
    if _is_async(pool):
        return None
    if not used_bytes:
        return free_bytes
    chunk_bytes = whole_chunk_bytes(pool, ordinal) if exact else None
    return None if chunk_bytes is None else min(chunk_bytes, free_bytes)


MAX_CHUNKS = 50_000
"""Largest number of chunks that are visited: more would hold the pool's lock and the GIL for many milliseconds."""
MAX_ATTEMPTS = 3


def whole_chunk_bytes(pool: Any, ordinal: int) -> int | None:
    """Return the bytes of the whole free chunks on this device, which must be the current one.

    None if the pool does not show its chunks, has too many, or keeps changing. Keeps no reference to a chunk: a chunk
    with a reference is not freed.
    """
    try:
        for _ in range(MAX_ATTEMPTS):
            if pool.n_free_blocks() > MAX_CHUNKS:
                return None
            whole_bytes = piece_bytes = 0
            for chunk in _free_chunks(_device_part(pool, ordinal)):
                if chunk.prev is None and chunk.next is None:
                    whole_bytes += chunk.size
                else:
                    piece_bytes += chunk.size
            if whole_bytes + piece_bytes == pool.total_bytes() - pool.used_bytes():
                return whole_bytes
    except Exception:  # the pool of another version, or a concurrent change
        return None
    return None


def _device_part(pool: Any, ordinal: int) -> Any:
    """Return the part of the pool for one device: an item of a dict until CuPy 13, of a tuple since."""
    parts = next(referent for referent in gc.get_referents(pool) if isinstance(referent, (dict, tuple)))
    return parts[ordinal]


def _free_chunks(pool: Any) -> Iterator[Any]:
    """Yield the free chunks of all arenas; there is one arena for each stream."""
    for referent in gc.get_referents(pool):
        for stream, arena in tuple(referent.items()) if isinstance(referent, dict) else ():
            if isinstance(arena, weakref.ref):
                yield from (chunk for _, chunk in _list_arena(pool, stream))
            elif type(arena).__name__ == "_Arena":
                (bins,) = gc.get_referents(arena)
                yield from (chunk for free in tuple(bins) if free for chunk in tuple(free))


def _list_arena(pool: Any, stream: int) -> list[tuple[object, Any]]:
    """Return the chunks that an arena of CuPy 14 lists while it holds its lock.

    Before Python 3.12 a new list may start a garbage collection at once, and with it a finalizer that needs the lock.
    """
    was_enabled = sys.version_info < (3, 12) and gc.isenabled()
    if was_enabled:
        gc.disable()
    try:
        return pool._debug_arena_get_index(stream)  # type: ignore[no-any-return]
    finally:
        if was_enabled:
            gc.enable()
