"""Stands in for CuPy: pools per device, spoken to through the current device, which is the thread's own."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

_driver = ctypes.CDLL("libcuda.so.1")
_thread = threading.local()
__version__ = "14.2.0"


def _set_device(device: int) -> None:
    _driver.fake_make_context(device)
    _thread.device = device


class MemoryPool:
    """``chunks`` per device: [used bytes, whole free bytes, split free bytes]."""

    def __init__(self) -> None:
        self.chunks: dict[int, list[int]] = {}

    def _mine(self) -> list[int]:
        return self.chunks.setdefault(cuda.runtime.getDevice(), [0, 0, 0])

    def malloc(self, size: int) -> None:
        self._mine()[0] += size

    def used_bytes(self) -> int:
        return self._mine()[0]

    def total_bytes(self) -> int:
        return sum(self._mine())

    def free_all_blocks(self) -> None:
        self._mine()[1] = 0


class MemoryAsyncPool(MemoryPool):
    pass


_default = MemoryPool()
_allocator = [_default.malloc]


def get_default_memory_pool() -> MemoryPool:
    return _default


cuda = SimpleNamespace(
    MemoryPool=MemoryPool,
    MemoryAsyncPool=MemoryAsyncPool,
    get_allocator=lambda: _allocator[0],
    set_allocator=lambda allocator: _allocator.__setitem__(0, allocator),
    runtime=SimpleNamespace(
        getDevice=lambda: getattr(_thread, "device", 0), setDevice=_set_device, deviceSynchronize=lambda: None
    ),
)
