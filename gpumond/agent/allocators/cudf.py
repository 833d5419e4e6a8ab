"""cuDF's spill manager (25.04 and later): live buffers that it can move to host memory.

The buffers are allocations of RMM. The resource decides when the driver gets spilled bytes back: a plain resource
returns them at once, a stream-ordered one after ``trim``, a pool never.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.mempools import NOT_RELEASABLE, GuardedAdapter
from gpumond.facts.pools import PoolUsage, StepResult

MAX_BUFFERS = 2_000
"""Largest number of buffers that the report of each second visits; a flush or a plan visits all."""


class CudfAdapter(GuardedAdapter):
    name = "cudf"
    main_thread_steps = frozenset(("spill",))
    """A spill copies on the calling thread's stream."""

    def __init__(self) -> None:
        self._visits_all = False

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read the buffers of a program that uses one device: the device of a buffer is unknown unless it is pinned."""
        manager, ordinals = _manager(), cuda.devices_with_context()
        self._visits_all = self._visits_all or exact
        if manager is None or len(ordinals) != 1:
            return ()
        if len(manager._buffers) > MAX_BUFFERS and not self._visits_all:
            return ()
        uuid = cuda.device_uuid(ordinals[0])
        live, spillable = _live_and_spillable_bytes(manager)
        if uuid is None or not live:
            return ()
        return (
            PoolUsage(
                allocator="cudf",
                device_uuid=uuid,
                live_bytes=live,
                held_bytes=live,
                reclaimable=NOT_RELEASABLE,
                stranded_bytes=0,
                inside="rmm",
                spillable_bytes=spillable,
            ),
        )

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        self.check()
        manager, ordinals = _manager(), cuda.devices_with_context()
        if "spill" not in steps or manager is None:
            return ()
        if len(ordinals) != 1:
            raise FlushRefused("the process has contexts on several devices, and the device of a buffer is unknown")
        started = time.perf_counter()
        if not cuda.synchronize(ordinals[0]):
            raise FlushRefused("the device didn't become idle")
        _, spillable = _live_and_spillable_bytes(manager)
        spilled = int(manager.spill_device_memory(nbytes=spillable))
        return (StepResult("spill", spilled, time.perf_counter() - started, "moved to host memory"),)

    def discard_exact_state(self) -> None:
        self._visits_all = False


def adapter() -> CudfAdapter:
    return CudfAdapter()


def _manager() -> Any:
    """Return the program's own manager. get_global_manager() would create one and change RMM's resource."""
    return getattr(sys.modules.get("cudf.core.buffer.spill_manager"), "_global_manager", None)


def _live_and_spillable_bytes(manager: Any) -> tuple[int, int]:
    """Return the bytes on the device, and the part of them that can be spilled."""
    live = spillable = 0
    for buffer in manager.buffers():
        if not buffer.is_spilled:
            live += buffer.size
            spillable += buffer.size if buffer.spillable else 0
    return live, spillable
