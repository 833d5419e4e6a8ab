"""PaddlePaddle's allocator (2.6 and later): its counters, and the release of its idle chunks.

Releasing creates a context on each device that is visible to the program, hundreds of MiB each, so a flush is
refused while one of several devices has none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.mempools import GuardedAdapter, caching_pool
from gpumond.facts.pools import PoolUsage

COUNTED_DEVICES = 16
"""Number of devices for which Paddle has counters."""


class PaddleAdapter(GuardedAdapter):
    name = "paddle"
    flush_step = "cache"
    main_thread_steps = frozenset(("cache",))
    """It also resets the workspaces of cuDNN."""

    def __init__(self, paddle: Any, core: Any) -> None:
        self._paddle, self._core = paddle, core

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read the counters of devices with a context. These calls don't reach CUDA."""
        pools = (self._usage(ordinal) for ordinal in cuda.devices_with_context() if ordinal < COUNTED_DEVICES)
        return tuple(pool for pool in pools if pool is not None)

    def check(self) -> None:
        super().check()
        if len(cuda.devices_with_context()) != cuda.device_count():
            raise FlushRefused("Paddle would create a context on each visible device, but at least one has none yet")

    def release(self) -> tuple[int, str]:
        held = self._held_bytes()
        self._paddle.device.cuda.empty_cache()
        return held - self._held_bytes(), ""

    def _usage(self, ordinal: int) -> PoolUsage | None:
        live, held = (self._count(name, ordinal) for name in ("Allocated", "Reserved"))
        uuid = cuda.device_uuid(ordinal) if held else None
        return None if uuid is None else caching_pool("paddle", uuid, live, held)

    def _held_bytes(self) -> int:
        return sum(
            self._count("Reserved", ordinal) for ordinal in cuda.devices_with_context() if ordinal < COUNTED_DEVICES
        )

    def _count(self, name: str, ordinal: int) -> int:
        return int(self._core.device_memory_stat_current_value(name, ordinal))


def adapter() -> PaddleAdapter | None:
    """Return None for a build without CUDA."""
    core = sys.modules.get("paddle.base.core")
    return PaddleAdapter(sys.modules["paddle"], core) if core is not None and core.is_compiled_with_cuda() else None
