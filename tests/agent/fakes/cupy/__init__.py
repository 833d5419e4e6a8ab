"""Fake for CuPy: pools per device, used through the current device of each thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace

_driver = ctypes.CDLL("libcuda.so.1")
_driver.fake_pool_handle.restype = ctypes.c_uint64
_driver.cuMemPoolGetAttribute.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p]
_driver.cuMemPoolTrimTo.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
_thread = threading.local()
__version__ = "14.2.0"


def _set_device(device: int) -> None:
    _driver.fake_make_context(device)
    _thread.device = device


def _synchronize() -> None:
    context = ctypes.c_void_p()
    _driver.cuCtxPushCurrent_v2(None)
    _driver.cuCtxSynchronize()
    _driver.cuCtxPopCurrent_v2(ctypes.byref(context))


def _malloc(size: int) -> None:
    raise NotImplementedError


def malloc_managed(size: int) -> None:
    raise NotImplementedError


_malloc.__module__ = malloc_managed.__module__ = "cupy.cuda.memory"


class MemoryPool:
    """``chunks`` per device: [used bytes, whole free bytes, split free bytes]. ``limits`` per device."""

    __slots__ = ("_allocator", "chunks", "limits")  # refers to its allocator, as a pool of CuPy does

    def __init__(self, allocator: Callable[[int], object] = _malloc) -> None:
        self._allocator = allocator
        self.chunks: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}

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

    def set_limit(self, size: int) -> None:
        self.limits[cuda.runtime.getDevice()] = size

    def get_limit(self) -> int:
        return self.limits.get(cuda.runtime.getDevice(), 0)


class MemoryAsyncPool:
    """Pools of the driver, one for each device."""

    def __init__(self, *indices: int) -> None:
        self._pools = [int(_driver.fake_pool_handle(index)) for index in indices]

    def malloc(self, size: int) -> None:
        raise NotImplementedError

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_uint64()
        _driver.cuMemPoolGetAttribute(self._pools[cuda.runtime.getDevice()], attribute, ctypes.byref(value))
        return value.value

    def used_bytes(self) -> int:
        return self._attribute(7)

    def total_bytes(self) -> int:
        return self._attribute(5)

    def free_all_blocks(self) -> None:
        _driver.cuMemPoolTrimTo(self._pools[cuda.runtime.getDevice()], 0)


class _BaseStream:
    def begin_capture(self, mode: object = None) -> None:
        pass

    def end_capture(self) -> str:
        return "graph"


_default = MemoryPool()
_allocator = [_default.malloc]


def get_default_memory_pool() -> MemoryPool:
    return _default


cuda = SimpleNamespace(
    MemoryPool=MemoryPool,
    MemoryAsyncPool=MemoryAsyncPool,
    get_allocator=lambda: _allocator[0],
    set_allocator=lambda allocator: _allocator.__setitem__(0, allocator),
    malloc_managed=malloc_managed,
    stream=SimpleNamespace(_BaseStream=_BaseStream),
    Stream=type("Stream", (_BaseStream,), {}),
    runtime=SimpleNamespace(
        getDevice=lambda: getattr(_thread, "device", 0), setDevice=_set_device, deviceSynchronize=_synchronize
    ),
)
