from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpumond.sim.allocator import CachingAllocator, allocators
from gpumond.sim.device import MIB, OutOfMemory, SimDevice
from tests.helpers.holding import run, small_device

SIZES = st.one_of(st.integers(0, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 60 * MIB))


class Allocations(RuleBasedStateMachine):
    """Sequences of allocations and frees, after each of which the bytes add up."""

    live = Bundle("live")

    @initialize()
    def make(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.device = small_device(Path(self.directory.name), size_mib=300)
        self.allocator = CachingAllocator(self.device)
        self.sizes: dict[int, int] = {}

    @rule(target=live, size=SIZES)
    def malloc(self, size: int) -> int | None:
        before = self.allocator.usage()
        try:
            address = self.allocator.malloc(size)
        except OutOfMemory:
            after = self.allocator.usage()
            assert (after.live_bytes, after.ooms, after.reclaimable.likely) == (before.live_bytes, before.ooms + 1, 0)
            return None
        self.sizes[address] = size
        return address

    @rule(address=consumes(live))
    def free(self, address: int | None) -> None:
        if address is not None:
            self.allocator.free(address)
            del self.sizes[address]

    @rule()
    def empty_cache(self) -> None:
        before = self.allocator.usage()
        assert self.allocator.empty_cache() == before.reclaimable.likely
        after = self.allocator.usage()
        assert before.held_bytes - after.held_bytes == before.reclaimable.likely
        assert (after.reclaimable.likely, after.stranded_bytes) == (0, before.stranded_bytes)

    @invariant()
    def shares_add_up(self) -> None:
        now = self.allocator.usage()
        assert now.held_bytes == now.live_bytes + now.reclaimable.likely + now.stranded_bytes
        assert min(now.live_bytes, now.reclaimable.likely, now.stranded_bytes) >= 0
        assert now.peak_live_bytes >= now.live_bytes
        assert now.peak_held_bytes >= now.held_bytes
        processes = self.device.read().processes
        assert processes is not None
        assert sum(process.used_bytes or 0 for process in processes) == now.held_bytes + 16 * MIB * len(processes)

    @invariant()
    def blocks_partition_the_segments(self) -> None:
        blocks = self.allocator.blocks()
        assert all(here + size <= there for (here, size, _), (there, _, _) in pairwise(blocks))
        assert sum(size for _, size, _ in blocks) == self.allocator.usage().held_bytes
        live = {address: size for address, size, free in blocks if not free}
        assert live.keys() == self.sizes.keys()
        assert self.allocator.usage().live_allocations == len(live)
        assert all(live[address] >= size for address, size in self.sizes.items())

    def teardown(self) -> None:
        for address in self.sizes:
            self.allocator.free(address)
        self.allocator.empty_cache()
        now = self.allocator.usage()
        assert (now.live_bytes, now.held_bytes) == (0, 0)
        assert now.device_allocations == now.device_frees
        self.allocator.close()
        self.directory.cleanup()


Allocations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocations = Allocations.TestCase


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return small_device(tmp_path)


@pytest.fixture
def allocator(device: SimDevice) -> Iterator[CachingAllocator]:
    allocator = CachingAllocator(device)
    yield allocator
    allocator.close()


@pytest.mark.parametrize(
    ("size", "live", "held"),
    [
        (0, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (19 * MIB - 1, 20 * MIB, 20 * MIB),
        (31 * MIB + 1, 32 * MIB, 32 * MIB),
    ],
)
def test_sizes_are_those_of_pytorch(allocator: CachingAllocator, size: int, live: int, held: int) -> None:
    allocator.malloc(size)
    now = allocator.usage()
    assert (now.live_bytes, now.held_bytes) == (live, held)


def test_live_neighbor_strands_the_rest_of_its_segment(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(100 * MIB))
    assert allocator.usage().reclaimable.likely == 100 * MIB
    allocator.malloc(4 * MIB)
    now = allocator.usage()
    assert (now.live_bytes, now.reclaimable.likely, now.stranded_bytes) == (4 * MIB, 0, 96 * MIB)
    assert allocator.empty_cache() == 0


def test_cache_is_released_before_an_allocation_fails(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(600 * MIB))
    allocator.malloc(700 * MIB)
    now = allocator.usage()
    assert (now.retries, now.ooms, now.held_bytes) == (1, 0, 700 * MIB)


def test_double_free_is_an_error(allocator: CachingAllocator) -> None:
    address = allocator.malloc(1)
    allocator.free(address)
    with pytest.raises(KeyError):
        allocator.free(address)


def test_process_has_one_allocator_per_device(device: SimDevice) -> None:
    allocator = CachingAllocator(device)
    with pytest.raises(ValueError, match="already"):
        CachingAllocator(device)
    assert allocator not in allocators(), "nothing was allocated yet"
    allocator.malloc(1)
    assert allocator in allocators()
    allocator.close()
    assert device.read().used_bytes == 0
    CachingAllocator(device)


def test_lock_excludes_other_threads(allocator: CachingAllocator) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            allocator.free(allocator.malloc(30 * MIB))

    thread = threading.Thread(target=churn)
    thread.start()
    for _ in range(50):
        with allocator.lock:
            assert allocator.usage().reclaimable.likely == allocator.empty_cache()
    stop.set()
    thread.join()


FORK = """
import os, sys
from gpumond.sim.allocator import CachingAllocator, allocators
from gpumond.sim.device import MIB, SimDevice
allocator = CachingAllocator(SimDevice(sys.argv[1]))
allocator.malloc(30 * MIB)
if os.fork() == 0:
    assert allocators() == []
    allocator.malloc(20 * MIB)
    print(allocator.usage().held_bytes // MIB, flush=True)
    os._exit(0)
os.wait()
print(allocator.usage().held_bytes // MIB)
"""


def test_forked_child_has_an_empty_allocator(device: SimDevice) -> None:
    assert run(FORK, str(device.directory)).split() == ["20", "30"]
