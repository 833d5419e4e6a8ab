"""Size and use of an Intel device's memory, which the drivers report through an ioctl and not in sysfs.

Layouts: include/uapi/drm/i915_drm.h and xe_drm.h of the kernel. Both drivers report the size to every user with access
to the render node, but the used memory only with CAP_PERFMON: without it, xe reports that nothing is used, and i915
that everything is free.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Iterator

from gpumond.sources.validation import MemoryCounts

Ioctl = Callable[[int, int, bytearray, bool], int]
DEVICE_MEMORY = 1
_MAX_ANSWER = 65536

_I915_QUERY, _I915_REGIONS = 0xC0106479, 4
_I915_ITEM = struct.Struct("=QiIQ")
_I915_REGION = struct.Struct("=HHIQQ64x")
_XE_QUERY, _XE_REGIONS = 0xC0286440, 1
_XE_ASK = struct.Struct("=QIIQ16x")
_XE_REGION = struct.Struct("=HHIQQ64x")


def memory(driver: str, node: str, ioctl: Ioctl = fcntl.ioctl) -> MemoryCounts:
    """Return the memory counts. All are None without device memory; used and free are None without permission.

    Raises OSError.
    """
    descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        regions = list((_xe if driver == "xe" else _i915)(descriptor, ioctl))
    finally:
        os.close(descriptor)
    size = sum(region[0] for region in regions)
    used = sum(region[1] for region in regions)
    if not size:
        return MemoryCounts()
    return MemoryCounts(size, used, size - used) if 0 < used <= size else MemoryCounts(size)


def _i915(descriptor: int, ioctl: Ioctl) -> Iterator[tuple[int, int]]:
    def ask(length: int, address: int) -> int:
        item = ctypes.create_string_buffer(_I915_ITEM.pack(_I915_REGIONS, length, 0, address), _I915_ITEM.size)
        ioctl(descriptor, _I915_QUERY, bytearray(struct.pack("=IIQ", 1, 0, ctypes.addressof(item))), True)
        return int(_I915_ITEM.unpack(item.raw)[1])

    for memory_class, _, _, size, free in _regions(_answer(ask), 16, _I915_REGION):
        if memory_class == DEVICE_MEMORY and free <= size:
            yield size, size - free


def _xe(descriptor: int, ioctl: Ioctl) -> Iterator[tuple[int, int]]:
    def ask(length: int, address: int) -> int:
        query = bytearray(_XE_ASK.pack(0, _XE_REGIONS, length, address))
        ioctl(descriptor, _XE_QUERY, query, True)
        return int(_XE_ASK.unpack(query)[2])

    for memory_class, _, _, size, used in _regions(_answer(ask), 8, _XE_REGION):
        if memory_class == DEVICE_MEMORY:
            yield size, used


def _answer(ask: Callable[[int, int], int]) -> bytes:
    """Return the response: the first call returns its length, the second its content."""
    length = ask(0, 0)
    if not 0 < length <= _MAX_ANSWER:
        return b""
    buffer = ctypes.create_string_buffer(length)
    ask(length, ctypes.addressof(buffer))
    return buffer.raw


def _regions(answer: bytes, header: int, region: struct.Struct) -> Iterator[tuple[int, ...]]:
    count = struct.unpack_from("=I", answer)[0] if len(answer) >= header else 0
    return region.iter_unpack(answer[header : header + min(count, (len(answer) - header) // region.size) * region.size])
