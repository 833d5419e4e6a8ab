"""Ioctl answers with the layouts of include/uapi/drm/{i915,xe}_drm.h, written to the queried address."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.devices.drm import intel_memory
from gpumond.devices.impossible_values import MemoryCounts
from tests.helpers.trees import MIB

Region = tuple[int, int, int]
"""Regions: class (1 is device memory), size, used (xe) or free (i915)."""


def i915(regions: list[Region]) -> Callable[[int, int, bytearray, bool], int]:
    answer = struct.pack("=I12x", len(regions))
    for memory_class, size, free in regions:
        answer += struct.pack("=HHIQQ8Q", memory_class, 0, 0, size, free, *[0] * 8)

    def ioctl(descriptor: int, request: int, query: bytearray, mutate: bool) -> int:
        assert request == 0xC0000000 | len(query) << 16 | ord("d") << 8 | 0x40 + 0x39
        count, flags, address = struct.unpack("=IIQ", query)
        item = ctypes.string_at(address, 24)
        number, length, _, data = struct.unpack("=QiIQ", item)
        assert (count, flags, number) == (1, 0, 4)
        if data:
            assert length == len(answer)
            ctypes.memmove(data, answer, length)
        ctypes.memmove(address, struct.pack("=QiIQ", number, len(answer), 0, data), 24)
        return 0

    return ioctl


def xe(regions: list[Region]) -> Callable[[int, int, bytearray, bool], int]:
    answer = struct.pack("=II", len(regions), 0)
    for memory_class, size, used in regions:
        answer += struct.pack("=HHIQQQQ6Q", memory_class, 0, 4096, size, used, size, used, *[0] * 6)

    def ioctl(descriptor: int, request: int, query: bytearray, mutate: bool) -> int:
        assert request == 0xC0000000 | len(query) << 16 | ord("d") << 8 | 0x40
        extensions, number, length, data, *_ = struct.unpack("=QIIQQQ", query)
        assert (extensions, number) == (0, 1)
        if data:
            assert length == len(answer)
            ctypes.memmove(data, answer, length)
        query[:] = struct.pack("=QIIQQQ", 0, number, len(answer), data, 0, 0)
        return 0

    return ioctl


HOST, SIZE = (0, 64 * MIB, 9 * MIB), 16 * MIB


@pytest.mark.parametrize(
    ("driver", "ioctl", "answer"),
    [
        ("xe", xe([HOST, (1, SIZE, 5 * MIB)]), MemoryCounts(SIZE, 5 * MIB, 11 * MIB)),
        ("xe", xe([HOST, (1, SIZE, 5 * MIB), (1, SIZE, MIB)]), MemoryCounts(2 * SIZE, 6 * MIB, 26 * MIB)),
        ("xe", xe([HOST, (1, SIZE, 0)]), MemoryCounts(SIZE)),
        ("xe", xe([HOST]), MemoryCounts()),
        ("xe", xe([]), MemoryCounts()),
        ("i915", i915([HOST, (1, SIZE, 11 * MIB)]), MemoryCounts(SIZE, 5 * MIB, 11 * MIB)),
        ("i915", i915([HOST, (1, SIZE, SIZE)]), MemoryCounts(SIZE)),
        ("i915", i915([HOST]), MemoryCounts()),
    ],
    ids=[
        "xe",
        "xe of two tiles",
        "xe unprivileged",
        "xe integrated",
        "xe empty",
        "i915",
        "i915 unprivileged",
        "i915 integrated",
    ],
)
def test_memory_is_that_of_the_device_only(tmp_path: Path, driver: str, ioctl, answer: MemoryCounts):
    node = tmp_path / "renderD128"
    node.touch()
    assert intel_memory(driver, str(node), ioctl) == answer


def test_kernel_without_the_query_returns_none(tmp_path: Path):
    node = tmp_path / "renderD128"
    node.touch()
    assert intel_memory("i915", str(node), lambda *_: 0) == MemoryCounts()


def test_file_that_is_no_device_is_an_error(tmp_path: Path):
    node = tmp_path / "renderD128"
    node.touch()
    with pytest.raises(OSError, match="ioctl"):
        intel_memory("xe", str(node))
