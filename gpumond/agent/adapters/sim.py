"""The simulated caching allocator. Its numbers are exact, and a flush returns what was predicted.

Only the program can tell this module that there is a simulated card: by having imported the allocator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gpumond import __version__
from gpumond.model import PoolUsage, Reclaimable, StepResult


class SimAdapter:
    name = "sim"

    def framework(self) -> str:
        return f"gpumond.sim {__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        return tuple(_usage(allocator) for allocator in _allocators())

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        if "cache" not in steps:
            return ()
        started = time.perf_counter()
        released = sum(allocator.empty_cache() for allocator in _allocators())
        return (StepResult("cache", released, time.perf_counter() - started),)


def adapter() -> SimAdapter:
    return SimAdapter()


def _allocators() -> Sequence[Any]:
    module = sys.modules.get("gpumond.sim.allocator")
    return () if module is None else module.allocators()


def _usage(allocator: Any) -> PoolUsage:
    now = allocator.statistics()
    return PoolUsage(
        allocator="sim",
        device_uuid=allocator.device_uuid,
        live_bytes=now.live_bytes,
        held_bytes=now.held_bytes,
        reclaimable=Reclaimable(now.reclaimable_bytes, now.reclaimable_bytes, now.reclaimable_bytes),
        stranded_bytes=now.stranded_bytes,
        peak_live_bytes=now.peak_live_bytes,
        peak_held_bytes=now.peak_held_bytes,
        ooms=now.ooms,
        retries=now.retries,
        device_allocations=now.device_allocations,
        device_frees=now.device_frees,
    )
