"""cuDF's spill manager (25.04 and later): live buffers that it can move to host memory.

The buffers are RMM's allocations. Whether the driver gets the bytes back when they are spilled is RMM's business: at
once from a plain resource, after ``trim`` from a stream-ordered one, never from a pool.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from gpumond.agent import cuda
from gpumond.agent.adapters import FlushRefused
from gpumond.model.pools import PoolUsage, Reclaimable, StepResult

MAX_BUFFERS = 2_000
"""More are not looked at once a second, only in a flush or for a plan."""


class CudfAdapter:
    name = "cudf"
    main_thread_steps = frozenset(("spill",))
    """A spill copies on the calling thread's stream."""

    def __init__(self, cudf: Any) -> None:
        self._cudf, self._looks_at_all = cudf, False

    def framework(self) -> str:
        return f"cudf {self._cudf.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Of a program on one device: a buffer does not tell where it is without being pinned there."""
        manager, ordinals = _manager(), cuda.contexts()
        self._looks_at_all = self._looks_at_all or exact
        if manager is None or len(ordinals) != 1:
            return ()
        if len(manager._buffers) > MAX_BUFFERS and not self._looks_at_all:
            return ()
        uuid = cuda.device_uuid(ordinals[0])
        live, spillable = _bytes(manager)
        if uuid is None or not live:
            return ()
        nothing = Reclaimable(0, 0, 0, "not_releasable")
        return (PoolUsage("cudf", uuid, live, live, nothing, 0, inside="rmm", spillable_bytes=spillable),)

    def flush(self, steps: Sequence[str]) -> Sequence[StepResult]:
        manager, ordinals = _manager(), cuda.contexts()
        if not ordinals:
            raise FlushRefused("no device has a live CUDA context")
        if cuda.CAPTURING:
            raise FlushRefused("a CUDA graph is being captured")
        if "spill" not in steps or manager is None:
            return ()
        if len(ordinals) != 1:
            raise FlushRefused("the process has contexts on several devices, and a buffer does not tell on which it is")
        started = time.perf_counter()
        if not cuda.settle(ordinals[0]):
            raise FlushRefused("the device does not come to rest")
        _, spillable = _bytes(manager)
        spilled = int(manager.spill_device_memory(nbytes=spillable))
        return (StepResult("spill", spilled, time.perf_counter() - started, "moved to host memory"),)

    def finish(self) -> None:
        self._looks_at_all = False


def adapter() -> CudfAdapter:
    return CudfAdapter(sys.modules["cudf"])


def _manager() -> Any:
    """The program's own; get_global_manager() would make one, and change RMM's resource."""
    return getattr(sys.modules.get("cudf.core.buffer.spill_manager"), "_global_manager", None)


def _bytes(manager: Any) -> tuple[int, int]:
    """On the device, and what of it can be spilled."""
    live = spillable = 0
    for buffer in manager.buffers():
        if not buffer.is_spilled:
            live += buffer.size
            spillable += buffer.size if buffer.spillable else 0
    return live, spillable
