"""Fake for CuPy: the functions that the load generator uses."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

from device import DEVICE, OTHERS, SIZE, Full, Pool

__version__ = "14.2.0"
_pointers = itertools.count(1)
_contents: dict[int, tuple[int, int]] = {}
"""Count and seed of the written pattern, by pointer."""

uint64 = int64 = int


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class MemoryPool:
    def __init__(self) -> None:
        self.pool = Pool(DEVICE, 512)

    def set_limit(self, size: int) -> None:
        self.pool.limit = size

    def used_bytes(self) -> int:
        return self.pool.live

    def total_bytes(self) -> int:
        return self.pool.held

    def free_all_blocks(self) -> None:
        self.pool.empty()

    def malloc(self, size: int) -> MemoryPointer:
        return MemoryPointer(_Pooled(self.pool, size), 0)


class _Pooled:
    def __init__(self, pool: Pool, size: int) -> None:
        try:
            self.size = pool.take(size)
        except Full:
            raise OutOfMemoryError(f"out of memory allocating {size} bytes") from None
        self.pool, self.ptr = pool, next(_pointers)

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.pool.give(self.size)


class Memory:
    def __init__(self, size: int) -> None:
        try:
            DEVICE.allocate(size)
        except Full:
            raise OutOfMemoryError(f"out of memory allocating {size} bytes") from None
        self.size, self.ptr = size, next(_pointers)

    def __del__(self) -> None:
        if hasattr(self, "size"):
            DEVICE.free(self.size)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Device:
    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class Stream(Device):
    def __init__(self, non_blocking: bool) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Words(list):  # type: ignore[type-arg]
    def fill(self, value: int) -> None:
        self[:] = [value] * len(self)


class RawModule:
    def __init__(self, code: str) -> None:
        assert "spin" in code

    def get_function(self, name: str) -> Any:
        return {"spin": _spin, "fill": _fill, "check": _check}[name]


def _spin(grid: Any, block: Any, arguments: Any) -> None:
    DEVICE.worked += 1


def _fill(grid: Any, block: Any, arguments: Any) -> None:
    pointer, count, seed = arguments
    _contents[pointer] = (count, seed)


def _check(grid: Any, block: Any, arguments: Any) -> None:
    pointer, count, seed, wrong = arguments
    wrong[0] += 0 if _contents[pointer] == (count, seed) else count
    wrong[0] += int(os.environ.get("FAKE_WRONG_WORDS", "0"))


def _memory_info() -> tuple[int, int]:
    if SIZE == 0:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return SIZE - OTHERS - DEVICE.used, SIZE


def zeros(count: int, dtype: Any) -> _Words:
    return _Words([0] * count)


_default = MemoryPool()


def get_default_memory_pool() -> MemoryPool:
    return _default


cuda = SimpleNamespace(
    Device=Device,
    Stream=Stream,
    Memory=Memory,
    MemoryPointer=MemoryPointer,
    MemoryPool=MemoryPool,
    MemoryAsyncPool=type("MemoryAsyncPool", (), {}),
    alloc=_default.malloc,
    get_allocator=lambda: _default.malloc,
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: 1,
        memGetInfo=_memory_info,
        deviceSynchronize=lambda: None,
    ),
)
