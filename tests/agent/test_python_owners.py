"""Plan for a stream-ordered pool by the blocks that Python objects own. Runs on the fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumond.agent.allocators.mempools import GRANULE_BYTES, Blocks, free_bytes_left_by_trim
from tests.agent.driver import run

PROGRAM = """
import ctypes, gc, rmm, sys, weakref
driver = ctypes.CDLL("libcuda.so.1")
MIB, BASE = 1 << 20, 0x7F00_0000_0000
class DeviceBuffer:
    def __init__(self, start, size):
        self.ptr, self.size = BASE + start * MIB, size * MIB
    def capacity(self):
        return self.size
rmm.DeviceBuffer = DeviceBuffer
def pool(reserved, used, index=0):
    driver.fake_pool(index, *(ctypes.c_uint64(mib * MIB) for mib in (reserved, used, 0)))
import gpumond.agent.allocators.cuda
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
from gpumond.agent.allocators import mempools as python_owners
def plan(dry_run=True):
    (receipt,) = (one for one in flush(dry_run=dry_run) if one.allocator == "mempool")
    promise = receipt.expected
    print(*(value // MIB for value in (promise.low, promise.likely, promise.high)))
    return receipt
kept = [DeviceBuffer(0, 8), DeviceBuffer(30, 10), DeviceBuffer(100, 2)]
pool(192, 20)
"""


def test_blocks_in_use_are_located_for_plans_and_flushes_only(library: Path) -> None:
    code = f"""{PROGRAM}
print(report()[-1].reclaimable.likely // MIB)
print(plan().before.reclaimable_bytes // MIB)
plan(dry_run=False)
"""
    assert run(code, library, "c") == ["172", "0 96 172", "96", "0 96 172"]


@pytest.mark.parametrize(
    "change",
    [
        "del kept[1]",
        "kept[1].size += 1",
        "kept[2].ptr = None",
        "kept.append(DeviceBuffer(0, 0)); del DeviceBuffer.capacity",
        "kept[2].ptr, kept[2].size = kept[0].ptr, kept[0].size",
        "gc.freeze()",
        "python_owners.MAX_HOLDERS = 2",
        "python_owners.MAX_ALLOCATIONS = 1000",
        "driver.fake_make_context(1)",
    ],
)
def test_incomplete_owners_are_ignored(library: Path, change: str) -> None:
    assert run(f"{PROGRAM}{change}\nplan()", library, "c-") == ["0 172 172"]


def test_located_blocks_replace_the_remainder_of_the_last_flush(library: Path) -> None:
    code = f"""{PROGRAM}
flush(), pool(192, 20)
kept[1:] = [DeviceBuffer(33, 12)]
plan()
kept.append(kept.pop().ptr)  # its owner is gone, the block is not
plan()
"""
    assert run(code, library, "c") == ["0 128 172", "0 172 172"]


def test_objects_of_other_types_are_skipped(library: Path) -> None:
    code = f"""{PROGRAM}
class Meta(type):
    def __eq__(self, other): raise RuntimeError("a type is compared")
    __hash__ = None
class Odd(metaclass=Meta):
    @property
    def __class__(self): raise RuntimeError("an object is asked for its class")
    def __getattr__(self, name): raise RuntimeError(name)
odd = [Odd() for _ in range(9)]
plan()
"""
    assert run(code, library, "c") == ["0 96 172"]


def test_owners_are_not_kept_alive(library: Path) -> None:
    code = f"""{PROGRAM}
gone = weakref.ref(kept[0])
plan()
gc.disable(), kept.clear()
print(gone(), cuda.devices_with_context(), driver.fake_retained())
"""
    assert run(code, library, "c") == ["0 96 172", "None [0] 0"]


def test_tensor_storages_count_without_gradients(library: Path) -> None:
    code = f"""{PROGRAM}
import torch
class Storage(DeviceBuffer):
    data_ptr, nbytes = lambda self: self.ptr, lambda self: self.size
class Tensor:
    is_cuda = is_leaf = True
    def __init__(self, *block): self.block = block
    def untyped_storage(self): return Storage(*self.block)
    grad = property(lambda self: print("asked for its gradient"))
torch.Tensor = Tensor
tensors = [Tensor(0, 8), Tensor(0, 8), Tensor(30, 10), Tensor(200, 6), Tensor(500, 1)]
tensors[-1].is_cuda = False
kept.clear(), pool(192, 24)
plan()
"""
    assert run(code, library, "c") == ["0 96 168"]


BASE = 0x7F00_0000_0000
MIB = 1 << 20


def at(**blocks: int) -> Blocks:
    """Parse ``m40=3`` as a block of 3 MiB at the 40th MiB."""
    return {BASE + int(name[1:]) * MIB: size * MIB for name, size in blocks.items()}


@pytest.mark.parametrize(
    ("blocks", "granules"),
    [
        ({}, 0),
        (at(m0=1), 1),
        (at(m0=32), 1),
        (at(m31=1, m32=1), 2),
        (at(m31=2), 2),
        (at(m0=1, m7=5, m20=12), 1),
        (at(m5=100), 4),
        (at(m0=1, m320=1), 2),
    ],
)
def test_granule_stays_if_a_block_touches_it(blocks: Blocks, granules: int):
    used = sum(blocks.values())
    assert free_bytes_left_by_trim(used, [blocks]) == granules * GRANULE_BYTES - used


@pytest.mark.parametrize("missed", [1, -1, MIB])
def test_blocks_that_disagree_with_the_pools_count_are_rejected(missed: int):
    blocks = at(m0=1, m40=5)
    assert free_bytes_left_by_trim(sum(blocks.values()) + missed, [blocks]) is None


@pytest.mark.parametrize("using", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_owners_of_one_kind_or_of_several_may_use_the_pool(using: set[int]):
    kinds = [at(m0=1), at(m33=2, m70=4), at(m1=8)]
    used = sum(sum(kinds[kind].values()) for kind in using)
    together = {address: size for kind in using for address, size in kinds[kind].items()}
    assert free_bytes_left_by_trim(used, kinds) == free_bytes_left_by_trim(used, [together])


def test_block_of_two_owners_counts_once():
    assert free_bytes_left_by_trim(MIB, [at(m0=1), at(m0=1)]) == 31 * MIB
    assert free_bytes_left_by_trim(3 * MIB, [at(m0=1), at(m0=1, m2=2)]) == 29 * MIB
