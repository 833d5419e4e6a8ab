"""Sleep mode of serving engines: private pools of PyTorch whose pages a library has released."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumond.agent.allocators.torch import TorchAdapter
from gpumond.agent.allocators.torch_formulas import SAVER_MODULE, VLLM_MODULE
from gpumond.facts.pools import PoolUsage, Reclaimable
from tests.agent.driver import run
from tests.agent.fakes import torch
from tests.agent.fakes.torch.world import ACTIVE, FREE, MIB, PENDING, Segment

PRIVATE = (0, 1)


@pytest.fixture
def world() -> Iterator[Any]:
    torch.WORLD.reset(
        segments=[
            Segment([(12 * MIB, ACTIVE), (8 * MIB, FREE)]),
            Segment([(40 * MIB, FREE)]),
            Segment([(60 * MIB, ACTIVE)], pool=PRIVATE),
            Segment([(30 * MIB, ACTIVE), (4 * MIB, PENDING), (6 * MIB, FREE)], pool=PRIVATE),
            Segment([(20 * MIB, FREE)], pool=PRIVATE),
        ]
    )
    yield torch.WORLD
    assert not [call for call in torch.WORLD.calls if call.startswith("forbidden")]


@pytest.fixture
def adapter() -> TorchAdapter:
    """The allocator fake answers for the driver: it unmaps segments, as a pluggable allocator does."""
    return TorchAdapter(torch, environ={}, is_mapped=is_mapped)


def is_mapped(address: int) -> bool | None:
    return next((segment.mapped for segment in torch.WORLD.segments if segment.address == address), None)


@pytest.fixture
def saver() -> Iterator[None]:
    sys.modules[SAVER_MODULE] = SimpleNamespace()  # type: ignore[assignment]
    yield
    del sys.modules[SAVER_MODULE]


@pytest.fixture
def vllm() -> Iterator[Any]:
    allocator = SimpleNamespace(pointer_to_data={})
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=None))
    sys.modules[VLLM_MODULE] = module  # type: ignore[assignment]
    yield lambda: setattr(module.CuMemAllocator, "instance", allocator) or allocator
    del sys.modules[VLLM_MODULE]


def sleep(world: Any, *places: int, mapped: bool = False) -> None:
    for place in places:
        world.segments[place].mapped = mapped


def pool_of(adapter: TorchAdapter, exact: bool = False) -> PoolUsage:
    (pool,) = adapter.read(exact)
    assert pool.held_bytes == pool.live_bytes + pool.reclaimable.likely + pool.stranded_bytes
    return pool


@pytest.mark.usefixtures("saver")
def test_unmapped_segments_are_not_part_of_live_and_held(world: Any, adapter: TorchAdapter) -> None:
    awake = pool_of(adapter)
    assert (awake.live_bytes, awake.held_bytes, awake.unmapped_bytes) == (102 * MIB, 180 * MIB, 0)
    assert (awake.private_bytes, awake.live_allocations) == (120 * MIB, 3)
    sleep(world, 2, 3)
    asleep = pool_of(adapter)
    assert (asleep.live_bytes, asleep.held_bytes, asleep.unmapped_bytes) == (12 * MIB, 80 * MIB, 100 * MIB)
    assert (asleep.private_bytes, asleep.live_allocations) == (20 * MIB, None)
    sleep(world, 2, mapped=True)
    assert pool_of(adapter).unmapped_bytes == 40 * MIB
    sleep(world, 3, mapped=True)
    assert pool_of(adapter) == awake


@pytest.mark.usefixtures("saver")
def test_flush_of_a_sleeping_program_promises_only_what_is_mapped(world: Any, adapter: TorchAdapter) -> None:
    assert pool_of(adapter, exact=True).reclaimable == Reclaimable(40 * MIB, 40 * MIB, 60 * MIB, "interval")
    sleep(world, 2, 3, 4)
    pool = pool_of(adapter, exact=True)
    assert pool.reclaimable == Reclaimable(40 * MIB, 40 * MIB, 40 * MIB, "exact")
    assert (pool.live_bytes, pool.held_bytes, pool.stranded_bytes) == (12 * MIB, 60 * MIB, 8 * MIB)
    assert pool.unmapped_bytes == 120 * MIB


@pytest.mark.usefixtures("saver")
def test_segments_are_read_again_only_after_a_change(world: Any, adapter: TorchAdapter) -> None:
    for _ in range(3):
        adapter.read()
    assert world.calls == ["snapshot"]
    sleep(world, 2)
    adapter.read()
    adapter.read()
    assert world.calls == ["snapshot"] * 2
    world.segments.append(Segment([(20 * MIB, ACTIVE)], pool=PRIVATE, mapped=False))
    world.allocations += 1
    assert pool_of(adapter).unmapped_bytes == 80 * MIB


@pytest.mark.usefixtures("saver")
def test_unmapped_bytes_are_unknown_without_the_driver_or_with_too_many_blocks(world: Any) -> None:
    sleep(world, 2)
    ignorant = TorchAdapter(torch, environ={}, is_mapped=lambda _: None)
    assert [pool.unmapped_bytes for pool in ignorant.read()] == [None]
    world.segments.append(Segment([(512, ACTIVE)] * 5_001))
    (pool,) = TorchAdapter(torch, environ={}, is_mapped=is_mapped).read()
    assert (pool.unmapped_bytes, pool.live_bytes) == (None, 102 * MIB + 512 * 5_001)


def test_driver_is_not_queried_without_a_library_that_releases_pages(world: Any) -> None:
    def never(address: int) -> bool | None:
        raise AssertionError(address)

    (pool,) = TorchAdapter(torch, environ={}, is_mapped=never).read()
    assert (pool.unmapped_bytes, pool.private_bytes) == (None, 120 * MIB)
    assert world.calls == []


def test_allocations_of_vllm_state_that_they_are_asleep(world: Any, adapter: TorchAdapter, vllm: Any) -> None:
    assert pool_of(adapter).unmapped_bytes is None  # vLLM has no allocator: sleep mode is disabled
    assert world.calls == []
    allocator = vllm()
    weights, cache, other = (segment.address for segment in world.segments[2:])
    allocator.pointer_to_data[weights] = SimpleNamespace(is_asleep=False)
    allocator.pointer_to_data[cache] = SimpleNamespace(is_asleep=True)
    allocator.pointer_to_data[other] = SimpleNamespace()  # of a version before 0.33, where the driver decides
    assert pool_of(adapter).unmapped_bytes == 40 * MIB
    sleep(world, 4)
    assert pool_of(adapter).unmapped_bytes == 60 * MIB


def test_unknown_version_of_a_library_leaves_the_pool(world: Any, adapter: TorchAdapter, vllm: Any) -> None:
    vllm().pointer_to_data = 7
    assert (pool_of(adapter).unmapped_bytes, pool_of(adapter).held_bytes) == (None, 180 * MIB)


def test_driver_is_asked_whether_addresses_have_pages(library: Path) -> None:
    code = """
import ctypes
from gpumond.agent.allocators import cuda
print(cuda.is_mapped(5), end=" ")
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_allocate.restype = ctypes.c_uint64
pointer = driver.fake_allocate(3, ctypes.c_uint64(64))
print(cuda.is_mapped(pointer), end=" ")
driver.fake_unmap(ctypes.c_uint64(pointer))
print(cuda.is_mapped(pointer), cuda.is_mapped(5))
"""
    assert run(code, library, "c") == ["None True False False"]
