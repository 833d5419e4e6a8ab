from __future__ import annotations

import threading
import weakref

import rmm.mr
from forbidden import forbidden

get_global_manager = forbidden("get_global_manager")  # would create one and change RMM's resource


class Buffer:
    """Memory of RMM, on the device until it is spilled."""

    def __init__(self, size: int, exposed: bool = False) -> None:
        self.size, self.exposed, self.is_spilled = size, exposed, False
        self.spilled_in: str | None = None
        self._resource = rmm.mr.get_per_device_resource(0)
        self._pointer = self._resource.allocate(size)
        if _global_manager is not None:
            _global_manager.add(self)

    @property
    def spillable(self) -> bool:
        return not self.exposed

    def spill(self) -> None:
        self._resource.deallocate(self._pointer, self.size)
        self.is_spilled, self.spilled_in = True, threading.current_thread().name

    ptr = property(forbidden("Buffer.ptr"))  # would pin it to the device permanently


class SpillManager:
    def __init__(self) -> None:
        self._buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()

    def add(self, buffer: Buffer) -> None:
        self._buffers[id(buffer)] = buffer

    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffers.values())

    def spill_device_memory(self, nbytes: int) -> int:
        spilled = 0
        for buffer in self.buffers():
            if not buffer.is_spilled and buffer.spillable:
                buffer.spill()
                spilled += buffer.size
                if spilled >= nbytes:
                    break
        return spilled


_global_manager: SpillManager | None = None


def set_global_manager(manager: SpillManager | None) -> None:
    global _global_manager
    _global_manager = manager
