"""CuPy's memory pools (12 and later).

A pool speaks only of the current device, and making a device current creates a context on it: only devices that
have one are visited, and the calling thread keeps its own device. Pinned host memory is not reported: CuPy's pool of
it counts blocks, not bytes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpumond.agent import cuda
from gpumond.agent.adapters import FlushRefused
from gpumond.agent.adapters.cupy_chunks import whole_bytes
from gpumond.agent.adapters.python_owners import left_by_trim
from gpumond.model.pools import PoolUsage, Reclaimable, StepResult
from gpumond.model.program import AppliedLimit

T = TypeVar("T")


class CupyAdapter:
    """The default pool, and the one in use if it is another of CuPy's. Where CuPy allocates through another library's
    function and has no pool of its own in between, there is nothing to report: that library has the bytes."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        streams = getattr(getattr(cupy.cuda, "stream", None), "_BaseStream", None)
        if streams is not None:
            cuda.watch_captures(streams, "begin_capture", "end_capture")

    def framework(self) -> str:
        return f"cupy {self._cupy.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        pools = self._pools()
        usages = self._on_devices(cuda.contexts(), lambda ordinal: self._usage(ordinal, pools, exact))
        return tuple(usage for usage in usages if usage is not None)

    def left(self) -> Mapping[str, int]:
        pools = [pool for pool in self._pools() if _is_async(pool)]
        counted = ((i, pool._pools[i]) for i in cuda.contexts() for pool in pools if self._inside(pool, i) is not None)
        return left_by_trim(
            (ordinal, amounts[1]) for ordinal, handle in counted if (amounts := cuda.pool_bytes(handle))
        )

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """CuPy frees whole free chunks with cudaFree; its stream-ordered pool first needs the device to be idle."""
        ordinals = cuda.contexts()
        if not ordinals:
            raise FlushRefused("no device has a live CUDA context")
        if cuda.CAPTURING:
            raise FlushRefused("a CUDA graph is being captured")
        if "cache" not in steps:
            return ()
        pools = self._pools()

        def free(ordinal: int) -> int:
            counted = [pool for pool in pools if self._inside(pool, ordinal) is not None]
            held = sum(int(pool.total_bytes()) for pool in counted)
            for pool in counted:
                if _is_async(pool):
                    self._cupy.cuda.runtime.deviceSynchronize()
                pool.free_all_blocks()
            return held - sum(int(pool.total_bytes()) for pool in counted)

        started = time.perf_counter()
        released = sum(self._on_devices(ordinals, free))
        return (StepResult("cache", max(0, released), time.perf_counter() - started),)

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """Of each pool on each device with a live context; 0 is CuPy's word for none."""
        pools = [pool for pool in self._pools() if not _is_async(pool)]
        chosen = [i for i in cuda.contexts() if device in (None, i, cuda.device_uuid(i))]
        if not pools:
            raise FlushRefused("CuPy's stream-ordered pool cannot be limited")

        def limit(ordinal: int) -> AppliedLimit:
            for pool in pools:
                pool.set_limit(size=limit_bytes or 0)
            return AppliedLimit("cupy", cuda.device_uuid(ordinal), limit_bytes, True)

        return self._on_devices(chosen, limit)

    def _pools(self) -> list[Any]:
        default = self._cupy.get_default_memory_pool()
        used = getattr(self._cupy.cuda.get_allocator(), "__self__", None)
        own = (self._cupy.cuda.MemoryPool, self._cupy.cuda.MemoryAsyncPool)
        return [default] if used is default or not isinstance(used, own) else [default, used]

    def _inside(self, pool: Any, ordinal: int) -> str | None:
        """The allocator from which the pool takes its memory, "" for the driver; None if it is not to be counted.

        A stream-ordered pool is the driver's: its default one is counted as such, whoever uses it. Another pool may
        stand on any function, which since CuPy 14 is among what the pool refers to: one that is not known may
        allocate memory that is another library's, or not the device's.
        """
        if _is_async(pool):
            handles = getattr(pool, "_pools", None)
            return "" if handles and handles[ordinal] != cuda.default_pool(ordinal) else None
        if pool is self._cupy.get_default_memory_pool():
            return ""
        sources = {(getattr(one, "__module__", None), getattr(one, "__name__", None)) for one in gc.get_referents(pool)}
        if ("cupy.cuda.memory", "_malloc") in sources:
            return ""
        return "rmm" if ("rmm.allocators.cupy", "rmm_cupy_allocator") in sources else None

    def _usage(self, ordinal: int, pools: Iterable[Any], exact: bool) -> PoolUsage | None:
        """All pools of one device together, which is the current one."""
        uuid = cuda.device_uuid(ordinal)
        by_source: dict[str | None, list[Any]] = {}
        for pool in pools:
            by_source.setdefault(self._inside(pool, ordinal), []).append(pool)
        for source in ("", "rmm"):
            live = free = low = high = 0
            for pool in by_source.get(source, ()):
                used, total = int(pool.used_bytes()), int(pool.total_bytes())
                idle = max(0, total - used)
                returned = _returned(pool, ordinal, used, idle, exact)
                live, free = live + used, free + idle
                low, high = low + (returned or 0), high + (idle if returned is None else returned)
            if uuid is not None and live + free:
                reclaimable = Reclaimable(low, high, high, "exact" if low == high else "interval")
                return PoolUsage("cupy", uuid, live, live + free, reclaimable, free - high, inside=source or None)
        return None

    def _on_devices(self, ordinals: Sequence[int], visit: Callable[[int], T]) -> list[T]:
        """Visits each with that device current."""
        runtime = self._cupy.cuda.runtime
        if not ordinals:
            return []
        before = runtime.getDevice()
        if before in ordinals:
            try:
                return [_at(runtime, ordinal, visit) for ordinal in ordinals]
            finally:
                runtime.setDevice(before)
        # To return to a device without a context would create one: a thread goes that need not return.
        with ThreadPoolExecutor(1, "gpumond-cupy") as thread:
            return list(thread.map(lambda ordinal: _aside(runtime, ordinal, visit), ordinals))


def adapter() -> CupyAdapter:
    return CupyAdapter(sys.modules["cupy"])


def _at(runtime: Any, ordinal: int, visit: Callable[[int], T]) -> T:
    runtime.setDevice(ordinal)
    return visit(ordinal)


def _aside(runtime: Any, ordinal: int, visit: Callable[[int], T]) -> T:
    with cuda.beside_captures():
        return _at(runtime, ordinal, visit)


def _is_async(pool: Any) -> bool:
    return type(pool).__name__ == "MemoryAsyncPool"


def _returned(pool: Any, ordinal: int, used: int, idle: int, exact: bool) -> int | None:
    """What a flush returns of the idle bytes: all if nothing is in use. None if only its bounds are known."""
    if _is_async(pool):
        return None
    if not used:
        return idle
    whole = whole_bytes(pool, ordinal) if exact else None
    return None if whole is None else min(whole, idle)
