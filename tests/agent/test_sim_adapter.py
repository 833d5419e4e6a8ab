from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from gpumond.agent.allocators.adapters import ADAPTERS, AllocatorAdapter, FlushRefused, adapter_if_imported
from gpumond.agent.allocators.sim import SimAdapter, adapter
from gpumond.agent.retainers import RetentionSearch
from gpumond.facts.pools import Reclaimable, StepResult
from gpumond.facts.program import Dump
from gpumond.sim.allocator import CachingAllocator, ProgramMemory
from gpumond.sim.device import MIB, SimDevice
from gpumond.sim.programs import leak
from tests.helpers.holding import run, small_device


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return small_device(tmp_path)


@pytest.fixture
def allocator(device: SimDevice) -> Iterator[CachingAllocator]:
    """Allocator with 60 MiB live and 40 stranded in one segment, and 50 cached."""
    allocator = CachingAllocator(device)
    for address in [allocator.malloc(100 * MIB), allocator.malloc(50 * MIB)]:
        allocator.free(address)
    allocator.malloc(60 * MIB)
    yield allocator
    allocator.close()


def test_simulated_allocator_is_found_in_its_program() -> None:
    found: list[AllocatorAdapter] = [adapter for adapter in map(adapter_if_imported, ADAPTERS) if adapter]
    assert "sim" in [adapter.name for adapter in found]


IMPORT = """
import sys
from gpumond.agent.allocators.sim import adapter
assert list(adapter().read()) == [] and list(adapter().flush(["cache"]))[0].released_bytes == 0
print("gpumond.sim.allocator" in sys.modules)
"""


def test_adapter_never_imports_the_simulated_allocator() -> None:
    assert run(IMPORT) == "False\n"


def test_figures_of_the_simulated_allocator_are_exact(allocator: CachingAllocator) -> None:
    (pool,) = adapter().read()
    assert (pool.allocator, pool.device_uuid) == ("sim", "SIM-test")
    assert (pool.live_bytes, pool.held_bytes, pool.stranded_bytes) == (60 * MIB, 150 * MIB, 40 * MIB)
    assert pool.reclaimable == Reclaimable(50 * MIB, 50 * MIB, 50 * MIB, "exact")
    assert (pool.peak_live_bytes, pool.ooms, pool.retries) == (150 * MIB, 0, 0)
    assert (pool.device_allocations, pool.device_frees, pool.live_allocations) == (2, 0, 1)


def test_unused_allocator_has_no_pool(device: SimDevice) -> None:
    allocator = CachingAllocator(device)
    assert list(adapter().read()) == []
    allocator.close()


def test_flush_releases_the_predicted_bytes_on_the_device(allocator: CachingAllocator, device: SimDevice) -> None:
    sim = SimAdapter()
    used = device.read().used_bytes or 0
    (before,) = sim.read(exact=True)
    (result,) = sim.flush(["ipc", "cache", "trim"])
    (after,) = sim.read()
    assert isinstance(result, StepResult)
    assert (result.step, result.released_bytes) == ("cache", before.reclaimable.likely)
    assert after.held_bytes == before.held_bytes - before.reclaimable.likely
    assert device.read().used_bytes == used - before.reclaimable.likely
    assert (after.live_bytes, after.stranded_bytes, after.reclaimable.high) == (60 * MIB, 40 * MIB, 0)


def test_only_requested_steps_are_carried_out(allocator: CachingAllocator) -> None:
    assert list(adapter().flush(["ipc", "trim"])) == []
    (pool,) = adapter().read()
    assert pool.held_bytes == 150 * MIB


@pytest.fixture
def memory(device: SimDevice) -> Iterator[ProgramMemory]:
    memory = ProgramMemory(device)
    yield memory
    memory.allocator.close()


def test_recording_names_the_line_of_the_program(memory: ProgramMemory) -> None:
    sim, older = SimAdapter(), memory.allocate(0.01)
    sim.start_history()
    kept = [memory.allocate(0.02) for _ in range(2)]
    memory.free(memory.allocate(0.1))
    dump, sites, unrecorded = sim.finish_history(lambda snapshot: Dump("sim", None, len(repr(snapshot))))
    (site,) = sites
    assert (site.size_bytes, site.blocks) == (sum(tensor.size_bytes for tensor in kept), 2)
    assert (site.calls[0].file, unrecorded) == (__file__, older.size_bytes)
    assert dump.size_bytes > 0
    assert not sim.live_sites(), "the recording is over"


def test_recording_before_the_first_allocation_is_refused() -> None:
    with pytest.raises(FlushRefused, match="nothing has been allocated yet"):
        SimAdapter().start_history()


def test_search_names_the_line_of_the_demo_that_leaks(memory: ProgramMemory) -> None:
    program = leak(memory, Random(1))
    for _ in islice(program, 100):
        pass
    search = RetentionSearch(SimAdapter().tracked_tensors)
    for _ in range(2):
        for _ in islice(program, 20):
            pass
        found = search.advance()
    (line,) = found or ()
    source = Path(line.file).read_text().splitlines()
    assert (line.function, line.name) == ("leak", "losses")
    assert "losses.append" in source[line.line - 1]
