"""Numba's CUDA memory manager: blocks in use, and freed blocks that it keeps in a list of pending deallocations.

The list is emptied at the latest when it has more than 10 blocks or a fifth of the device. Nothing else is cached, so
that the pending bytes are exactly those that a flush returns. Attributes are read without the functions of Numba that
initialize the driver or create a context.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.mempools import GuardedAdapter
from gpumond.facts.pools import PoolUsage, Reclaimable

DEVICES_MODULE, DRIVER_MODULE = "numba.cuda.cudadrv.devices", "numba.cuda.cudadrv.driver"
HOST_MEMORY_CLASSES = ("MappedMemory", "ManagedMemory")
"""Classes of memory that is not, or need not be, on the device."""


class NumbaAdapter(GuardedAdapter):
    """Reads Numba's own memory manager. The memory of a plug-in, such as RMM's, is counted by its library."""

    name = "numba"
    flush_step = "cache"
    main_thread_steps = frozenset(("cache",))
    """Another thread may empty the list at the same moment."""

    def framework(self) -> str:
        package = sys.modules.get("numba_cuda") or sys.modules["numba"]
        return f"numba {package.__version__}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        pools = (_usage(ordinal, manager) for ordinal, manager in _managers())
        return tuple(pool for pool in pools if pool is not None)

    def check(self) -> None:
        super().check()
        if any(manager.deallocations.is_disabled for _, manager in _managers()):
            raise FlushRefused("the program defers Numba's deallocations (cuda.defer_cleanup)")

    def release(self) -> tuple[int, str]:
        if _is_list_changing():
            raise FlushRefused("a thread of the program is emptying Numba's list of pending deallocations")
        released = 0
        for ordinal, manager in _managers():
            pending = _pending_bytes(manager)
            with cuda.current_context(ordinal) as ready:
                if ready:
                    manager.deallocations.clear()
                    released += pending - _pending_bytes(manager)
        return released, ""


def adapter() -> NumbaAdapter | None:
    """Return None until Numba has created a context."""
    return NumbaAdapter() if next(_managers(), None) else None


def managed_bytes() -> Iterator[tuple[int, int]]:
    """Yield the device of each of Numba's memory managers, and the bytes of its managed arrays."""
    for ordinal, manager in _managers():
        yield ordinal, sum(size for class_name, size in _blocks(manager) if class_name == "ManagedMemory")


def _blocks(manager: Any) -> list[tuple[str, int]]:
    return [(type(block).__name__, int(block.size)) for block in list(manager.allocations.values())]


def _managers() -> Iterator[tuple[int, Any]]:
    """Yield ordinal and memory manager of each device on which Numba has a context."""
    for device in _devices():
        context = getattr(device, "primary_context", None)
        manager = getattr(context, "memory_manager", None)
        if type(manager).__name__ == "NumbaCUDAMemoryManager" and cuda.has_context(device.id):
            yield device.id, manager


def _devices() -> list[Any]:
    """Return Numba's devices, if it has listed them: listing them initializes the driver."""
    gpus: Any = getattr(sys.modules.get(DEVICES_MODULE), "gpus", None)
    device_list = getattr(gpus, "__dict__", {}).get("lst")
    if device_list is None:  # in numba-cuda a cached property
        cached = getattr(getattr(vars(type(gpus)).get("lst"), "fget", None), "cache_info", None)
        device_list = gpus.lst if cached is not None and cached().currsize else ()
    return [vars(each)["_device"] for each in device_list]


def _usage(ordinal: int, manager: Any) -> PoolUsage | None:
    uuid = cuda.device_uuid(ordinal)
    if uuid is None:
        return None
    blocks = _blocks(manager)
    device_sizes = [size for class_name, size in blocks if class_name not in HOST_MEMORY_CLASSES]
    live = sum(device_sizes)
    pending = _pending_bytes(manager)
    has_managed = any(
        class_name == "ManagedMemory" for class_name, _ in blocks
    )  # once freed, it cannot be distinguished
    return PoolUsage(
        allocator="numba",
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=live + pending,
        reclaimable=Reclaimable(
            0 if has_managed else pending, pending, pending, "interval" if has_managed else "exact"
        ),
        stranded_bytes=0,
        live_allocations=len(device_sizes),
    )


def _pending_bytes(manager: Any) -> int:
    """Return the bytes of device memory in the list, which also contains pinned host memory."""
    free = vars(sys.modules[DRIVER_MODULE].driver).get("cuMemFree")
    return sum(int(size) for function, _, size in list(manager.deallocations._cons) if function is free)


def _is_list_changing() -> bool:
    """Return whether a thread, or a frame below this one, is inside a method of the list."""
    methods = vars(sys.modules[DRIVER_MODULE]._PendingDeallocs)
    codes = {methods[name].__code__ for name in ("add_item", "clear")}
    return any(_is_running(frame, codes) for frame in sys._current_frames().values())


def _is_running(frame: FrameType | None, codes: set[CodeType]) -> bool:
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False
