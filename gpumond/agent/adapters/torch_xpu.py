"""PyTorch's XPU allocator (Intel; 2.6 and later). Builds with it have no CUDA.

A PyTorch that has not initialised XPU, or did so before this process was forked, is not queried. The allocator frees in
one context for all devices, which its initialisation created; the adapter creates none. The statistics do not contain
the cached bytes in partly used segments, so that the bytes that a flush returns are an interval. It includes expandable
segments and the pools of graphs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gpumond.agent import cuda
from gpumond.agent.adapters import AllocatorAdapter, FlushRefused, drm_devices
from gpumond.agent.adapters.torch_formulas import current
from gpumond.model.pools import PoolUsage, Reclaimable, StepResult


class XpuAdapter(AllocatorAdapter):
    name = "torch"

    def __init__(self, torch: Any, sys: str = "/sys") -> None:
        self._torch, self._xpu, self._c, self._sys = torch, torch.xpu, torch._C, sys
        self._uuids: dict[int, str | None] = {}
        if graph := getattr(torch.xpu, "XPUGraph", None):  # 2.11
            cuda.watch_captures(graph)

    def framework(self) -> str:
        return f"torch {self._torch.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read the devices. Tiles that PyTorch shows as separate devices make one pool, since they are one device."""
        if not self._xpu.is_initialized():
            return ()
        pools: dict[str, list[tuple[int, int]]] = {}
        for ordinal in range(self._device_count()):
            stats = self._c._xpu_memoryStats(ordinal)
            live, held = (current(stats, f"{name}_bytes") for name in ("allocated", "reserved"))
            uuid = self._uuid(ordinal) if held else None
            if uuid is not None:
                pools.setdefault(uuid, []).append((live, held))
        return tuple(_usage(uuid, *map(sum, zip(*parts, strict=True))) for uuid, parts in pools.items())

    def check(self) -> None:
        if not self._xpu.is_initialized():
            forked = self._xpu._is_in_bad_fork()
            raise FlushRefused(
                "XPU was initialised before this process was forked" if forked else "XPU is not initialised"
            )
        if cuda.capturing():
            raise FlushRefused("an XPU graph is being captured")

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        """Empty the cache, after the device's queues are empty, as PyTorch itself does when memory is short."""
        self.check()
        if "cache" not in steps:
            return ()
        held, started = self._held_bytes(), time.perf_counter()
        self._xpu.empty_cache()
        seconds = time.perf_counter() - started
        return (StepResult("cache", max(0, held - self._held_bytes()), seconds),)

    def _device_count(self) -> int:
        return len(self._xpu.default_generators)  # device_count() may query the driver

    def _held_bytes(self) -> int:
        return sum(current(self._c._xpu_memoryStats(i), "reserved_bytes") for i in range(self._device_count()))

    def _uuid(self, ordinal: int) -> str | None:
        if ordinal not in self._uuids:
            self._uuids[ordinal] = drm_devices.intel(self._xpu.get_device_properties(ordinal), self._sys)
        return self._uuids[ordinal]


def adapter() -> XpuAdapter | None:
    """Return None for a build without XPU, which has the module all the same."""
    torch = sys.modules["torch"]
    return XpuAdapter(torch) if getattr(torch._C, "_has_xpu", False) else None


def _usage(uuid: str, live: int, held: int) -> PoolUsage:
    cached = max(0, held - live)
    return PoolUsage(
        allocator="torch",
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=held,
        reclaimable=Reclaimable(0, cached, cached, "interval"),
        stranded_bytes=0,
    )
