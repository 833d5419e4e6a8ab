"""NVIDIA Warp (1.10 and later): the bytes in use of the device's default memory pool, from which it allocates.

`mempools` counts and trims this pool. Warp's functions for these bytes initialize Warp; the driver returns the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.mempools import KeepingAdapter, allocator_counting_default_pool, kept_pool
from gpumond.facts.pools import PoolUsage


class WarpAdapter(KeepingAdapter):
    name = "warp"

    def __init__(self) -> None:
        cuda.CAPTURE_CHECKS.append(_is_capturing)

    def framework(self) -> str:
        return f"warp {sys.modules['warp'].config.version}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        pools = (_usage(ordinal) for ordinal in sorted({device.ordinal for device in _devices() if _uses_pool(device)}))
        return tuple(pool for pool in pools if pool is not None)


def adapter() -> WarpAdapter | None:
    """Return None until Warp uses a device."""
    return WarpAdapter() if _devices() else None


def _devices() -> list[Any]:
    """Return the devices on which Warp has a context; empty before Warp is initialized."""
    runtime = getattr(sys.modules.get("warp._src.context"), "runtime", None)
    devices = getattr(runtime, "cuda_devices", ())
    return [device for device in list(devices) if device.has_context and cuda.has_context(device.ordinal)]


def _uses_pool(device: Any) -> bool:
    """Return False if the program has disabled the pool or set an allocator of its own, such as RMM's."""
    return bool(device.is_mempool_enabled) and getattr(device, "_custom_allocator", None) is None


def _usage(ordinal: int) -> PoolUsage | None:
    pool, uuid = cuda.default_pool(ordinal), cuda.device_uuid(ordinal)
    pool_bytes = None if pool is None else cuda.mempool_bytes(pool)
    inside = allocator_counting_default_pool(ordinal, 0)
    if uuid is None or not pool_bytes or inside is None:
        return None
    return kept_pool("warp", uuid, pool_bytes.used, pool_bytes.used, inside=inside)


def _is_capturing() -> bool:
    return any(getattr(device, "captures", ()) for device in _devices())
