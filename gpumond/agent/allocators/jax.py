"""JAX (0.4 and later): allocator statistics of the devices of its client.

XLA's best-fit allocator (BFC, the default) keeps all memory until the process ends, so nothing can be released.
With XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async the bytes are in a memory pool of the driver: the device's default pool,
which `mempools` counts and trims, or a pool of XLA, which cannot be reached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.mempools import KeepingAdapter, allocator_counting_default_pool, kept_pool
from gpumond.facts.pools import PoolUsage


class JaxAdapter(KeepingAdapter):
    name = "jax"

    def __init__(self) -> None:
        self._limits: dict[str, int] = {}

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read only a backend that the program has initialized: jax.devices() would initialize it and allocate."""
        return tuple(self._usages())

    def _usages(self) -> Iterator[PoolUsage]:
        uses_default_pool = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "cuda_async"
        for device in _devices():
            ordinal = device.local_hardware_id
            if not cuda.has_context(ordinal):
                continue  # also in a forked child, whose copies of XLA's threads and locks are unusable
            stats = device.memory_stats()
            uuid = cuda.device_uuid(ordinal)
            if stats and uuid:
                self._limits[uuid] = stats.get("bytes_limit", 0)
                live, held = stats["bytes_in_use"], stats.get("pool_bytes")
                inside = allocator_counting_default_pool(ordinal, live) if uses_default_pool else None
                yield kept_pool("jax", uuid, live, held, stats.get("peak_bytes_in_use"), inside)

    def own_limits(self) -> Mapping[str, int]:
        """Return the parts of the devices that XLA may use. They're known from reports: JAX's exit ends its backend
        before an unhandled error is recorded.
        """
        return {uuid: size for uuid, size in self._limits.items() if size}


def adapter() -> JaxAdapter:
    return JaxAdapter()


def _devices() -> Iterator[Any]:
    # backends_are_initialized() would wait for the lock of an initialization, which may be long.
    bridge = sys.modules.get("jax._src.xla_bridge")
    client = getattr(bridge, "_backends", {}).get("cuda")
    return iter(() if client is None else client.local_devices())
