"""Out-of-memory pools: memory that PyTorch uses only when an allocation fails (``MemPool(use_on_oom=True)``).

Its use is an out-of-memory error that the program does not notice: it is counted and recorded as one, once for each
time that the pool changes from free to used.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpumond.agent.allocators import cuda
from gpumond.agent.measure.oom_record import OOMS
from gpumond.facts.pools import PoolUsage


class OpenPool(NamedTuple):
    pool: Any
    device_uuid: str


class OomPools:
    """The out-of-memory pools of this process."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._open_pools: list[OpenPool] = []
        self._used_indexes: set[int] = set()
        self._use_counts: Counter[str] = Counter()

    def open(self, size_bytes: int, device: int | None) -> str:
        """Set the memory aside in the calling thread, and return an empty text or why there is none. Never raises."""
        torch = sys.modules.get("torch")
        if torch is None or not cuda.devices_with_context():
            return "PyTorch hasn't used a CUDA device yet"
        try:
            ordinal = torch.cuda.current_device() if device is None else device
            pool = torch.cuda.MemPool(use_on_oom=True)
            with torch.cuda.use_mem_pool(pool, ordinal):
                torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")  # freed at once, into the pool
        except TypeError:
            return "this PyTorch has no MemPool(use_on_oom=True)"
        except Exception as error:  # no room for it, or a build without pools
            return f"{type(error).__name__}: {str(error)[:160]}"
        self._open_pools.append(OpenPool(pool, cuda.device_uuid(ordinal) or ""))
        return ""

    def record_uses(self) -> None:
        """Record each pool that has come into use. Called before each report."""
        for index, open_pool in enumerate(self._open_pools):
            used = _used_bytes(open_pool.pool)
            if used and index not in self._used_indexes:
                self._used_indexes.add(index)
                self._use_counts[open_pool.device_uuid] += 1
                OOMS.record_oom_pool(open_pool.device_uuid or None, used, threading.main_thread().ident)
            elif not used:
                self._used_indexes.discard(index)

    def add_uses(self, pools: Sequence[PoolUsage]) -> tuple[PoolUsage, ...]:
        """Return the pools, with the uses among the errors of PyTorch's."""
        if not self._use_counts:
            return tuple(pools)
        return tuple(
            replace(pool, ooms=(pool.ooms or 0) + self._use_counts[pool.device_uuid])
            if pool.allocator == "torch" and self._use_counts[pool.device_uuid]
            else pool
            for pool in pools
        )


def _used_bytes(pool: Any) -> int:
    try:
        return sum(int(segment["allocated_size"]) for segment in pool.snapshot())
    except Exception:  # a version of PyTorch that is not understood
        return 0


OOM_POOLS = OomPools()
