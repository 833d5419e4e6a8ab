"""CuPy's memory pools (12 and later).

A pool speaks only of the current device, and making a device current creates a context on it: only devices that
have one are visited, and the calling thread keeps its own device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpumond.agent import cuda
from gpumond.agent.adapters import Refused
from gpumond.model import PoolUsage, Reclaimable, StepResult

T = TypeVar("T")


class CupyAdapter:
    """The default pool, and the one in use if it is another of CuPy's. Under RMM or another library's
    allocator there is nothing of CuPy's own to report: the bytes are in that library's pool."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._uuids: dict[int, str | None] = {}

    def framework(self) -> str:
        return f"cupy {self._cupy.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        pools = self._pools()
        usages = self._on_devices(cuda.contexts(), lambda ordinal: self._usage(ordinal, pools))
        return tuple(usage for usage in usages if usage is not None)

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """CuPy frees whole free chunks with cudaFree; its stream-ordered pool first needs the device to be idle."""
        ordinals = cuda.contexts()
        if not ordinals:
            raise Refused("no device has a live CUDA context")
        if cuda.CAPTURING:
            raise Refused("a CUDA graph is being captured")
        if "cache" not in steps:
            return ()
        pools = self._pools()

        def free(ordinal: int) -> int:
            held = sum(int(pool.total_bytes()) for pool in pools)
            for pool in pools:
                if _is_async(pool):
                    self._cupy.cuda.runtime.deviceSynchronize()
                pool.free_all_blocks()
            return held - sum(int(pool.total_bytes()) for pool in pools)

        started = time.perf_counter()
        released = sum(self._on_devices(ordinals, free))
        return (StepResult("cache", max(0, released), time.perf_counter() - started),)

    def _pools(self) -> list[Any]:
        default = self._cupy.get_default_memory_pool()
        used = getattr(self._cupy.cuda.get_allocator(), "__self__", None)
        own = (self._cupy.cuda.MemoryPool, self._cupy.cuda.MemoryAsyncPool)
        return [default] if used is default or not isinstance(used, own) else [default, used]

    def _usage(self, ordinal: int, pools: Iterable[Any]) -> PoolUsage | None:
        """All pools of one device together. A pool returns its whole free chunks and does not tell which these are:
        everything if nothing is in use, else anything up to its free bytes, which is taken as likely."""
        if ordinal not in self._uuids:
            self._uuids[ordinal] = cuda.device_uuid(ordinal)
        uuid = self._uuids[ordinal]
        low = live = held = 0
        for pool in pools:
            used, total = int(pool.used_bytes()), int(pool.total_bytes())
            live, held = live + used, held + total
            low += 0 if used or _is_async(pool) else total
        if uuid is None or not held:
            return None
        free = max(0, held - live)
        low = min(low, free)
        reclaimable = Reclaimable(low, free, free, "exact" if low == free else "interval")
        return PoolUsage("cupy", uuid, live, live + free, reclaimable, 0)

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
            return list(thread.map(lambda ordinal: _at(runtime, ordinal, visit), ordinals))


def adapter() -> CupyAdapter:
    return CupyAdapter(sys.modules["cupy"])


def _at(runtime: Any, ordinal: int, visit: Callable[[int], T]) -> T:
    runtime.setDevice(ordinal)
    return visit(ordinal)


def _is_async(pool: Any) -> bool:
    return type(pool).__name__ == "MemoryAsyncPool"
