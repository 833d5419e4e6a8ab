"""PyTorch adapter over a fake that fails on every call that could create a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import FlushRefused
from gpumond.agent.allocators.torch import TorchAdapter
from gpumond.facts.pools import HostPool, Reclaimable
from tests.agent.fakes import torch
from tests.agent.fakes.torch.world import ACTIVE, FREE, MIB, PENDING, Segment

UUID = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def world() -> Iterator[Any]:
    torch.WORLD.reset(
        segments=[
            Segment([(12 * MIB, ACTIVE), (8 * MIB, FREE)]),
            Segment([(40 * MIB, FREE)]),
            Segment([(2 * MIB, PENDING)], small=True),
        ]
    )
    yield torch.WORLD
    assert not [call for call in torch.WORLD.calls if call.startswith("forbidden")]


@pytest.fixture
def adapter() -> TorchAdapter:
    return TorchAdapter(torch, environ={})


def test_the_largest_free_block_is_one_that_any_request_can_use(world: Any, adapter: TorchAdapter) -> None:
    world.segments.append(Segment([(400 * MIB, FREE)], pool=(0, 1)))
    assert adapter.largest_free_bytes() == {UUID: 40 * MIB}


def test_pool_is_live_and_reclaimable_and_stranded(world: Any, adapter: TorchAdapter) -> None:
    (pool,) = adapter.read()
    assert (pool.allocator, pool.device_uuid) == ("torch", UUID)
    assert (pool.live_bytes, pool.held_bytes, pool.stranded_bytes) == (12 * MIB, 62 * MIB, 8 * MIB)
    assert pool.reclaimable == Reclaimable(40 * MIB, 42 * MIB, 50 * MIB, "interval")
    assert (pool.ooms, pool.retries, pool.device_allocations, pool.device_frees) == (1, 2, 3, 0)
    assert pool.live_allocations == 1
    (pool,) = adapter.read(exact=True)
    assert pool.reclaimable == Reclaimable(42 * MIB, 42 * MIB, 42 * MIB, "exact")


def test_reading_has_the_current_values(world: Any, adapter: TorchAdapter) -> None:
    (before,) = adapter.read()
    assert adapter.read() == (before,)
    world.segments.append(Segment([(20 * MIB, FREE)]))
    (after,) = adapter.read()
    assert (after.held_bytes, after.reclaimable.low) == (
        before.held_bytes + 20 * MIB,
        before.reclaimable.low + 20 * MIB,
    )
    world.settings = "expandable_segments:True"
    assert adapter.read()[0].reclaimable == Reclaimable(0, 62 * MIB, 70 * MIB, "interval")


def test_torch_is_not_queried_before_cuda_is_initialized(world: Any, adapter: TorchAdapter) -> None:
    world.reset(initialized=False)
    assert adapter.read(exact=True) == ()
    with pytest.raises(FlushRefused, match="isn't initialized"):
        adapter.flush(("cache",))
    assert world.calls == []


def test_forked_child_does_not_query_torch(world: Any, adapter: TorchAdapter) -> None:
    world.bad_fork = True
    assert adapter.read() == ()
    with pytest.raises(FlushRefused, match="forked"):
        adapter.flush(("cache",))


def test_device_that_the_program_does_not_use_is_not_reported(world: Any, adapter: TorchAdapter) -> None:
    world.devices = 8
    assert [pool.device_uuid for pool in adapter.read()] == [UUID]


@pytest.mark.parametrize("steps", [("cache",), ("ipc", "cache")])
def test_flush_returns_the_predicted_bytes(world: Any, adapter: TorchAdapter, steps: tuple[str, ...]) -> None:
    (before,) = adapter.read(exact=True)
    results = adapter.flush((*steps, "trim", "gc"))
    assert tuple(result.step for result in results) == steps
    assert results[-1].released_bytes == before.reclaimable.likely
    assert ("ipc_collect" in world.calls) == ("ipc" in steps)


def test_plans_are_cleared_on_devices_with_a_context(world: Any, adapter: TorchAdapter) -> None:
    world.devices, world.plans = 2, {0: 3, 1: 4}
    (result,) = adapter.flush(("plans",))
    assert (result.step, result.detail, world.plans) == ("plans", "3 cuFFT plans", {1: 4})
    assert "plans" in adapter.main_thread_steps
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(), graph.capture_end()
    with pytest.raises(FlushRefused, match="captured"):
        adapter.flush(("plans",))


def test_host_cache_is_emptied_and_counts_as_no_device_memory(world: Any, adapter: TorchAdapter) -> None:
    world.host = {"allocated_bytes": 96, "active_bytes": 64}
    (result,) = adapter.flush(("host",))
    assert (result.step, result.released_bytes, result.detail) == ("host", 0, "32 bytes of host memory")
    assert adapter.host_pools() == (HostPool("torch", 64, 64),)


def test_flush_creates_no_context_on_device_0(world: Any, adapter: TorchAdapter) -> None:
    world.reset(segments=[Segment([(20 * MIB, FREE)], device=3)], devices=4, contexts={3}, current=0)
    adapter.flush(("cache",))
    assert world.contexts == {3}
    assert world.calls == ["empty_cache on 3"]
    assert world.held(3) == 0


def test_flush_keeps_the_current_device_of_the_thread(world: Any, adapter: TorchAdapter) -> None:
    world.devices, world.contexts, world.current = 2, {0, 1}, 1
    adapter.flush(("cache",))
    assert (world.current, world.calls) == (1, ["empty_cache on 1"])


def test_flush_frees_nothing_without_a_live_context(world: Any, adapter: TorchAdapter) -> None:
    world.contexts.clear()
    with pytest.raises(FlushRefused, match="no device"):
        adapter.flush(("cache",))


def test_flush_is_refused_during_a_capture(world: Any, adapter: TorchAdapter) -> None:
    graph = torch.cuda.CUDAGraph()
    assert graph.capture_begin() == "began"
    with pytest.raises(FlushRefused, match="captured"):
        adapter.flush(("cache",))
    assert graph.capture_end() == "ended"
    assert adapter.flush(("cache",))


def test_capture_waits_for_the_flush_under_way(world: Any, adapter: TorchAdapter) -> None:

    graph, capturing = torch.cuda.CUDAGraph(), threading.Event()

    def capture() -> None:
        graph.capture_begin()
        capturing.set()

    with cuda.delayed_captures():
        thread = threading.Thread(target=capture)
        thread.start()
        assert not capturing.wait(0.05)
    thread.join()
    assert capturing.is_set()
    graph.capture_end()


def test_capture_that_fails_to_begin_does_not_count(world: Any, adapter: TorchAdapter) -> None:
    with pytest.raises(RuntimeError, match="cannot capture"):
        torch.cuda.CUDAGraph().capture_begin(capture_error_mode="fail")
    assert not cuda.CAPTURING_GRAPHS
    assert torch.cuda.CUDAGraph.capture_begin.__doc__ == "Begin."


@pytest.mark.parametrize("records_history", [False, True])
def test_snapshots_before_2_11_are_taken_only_without_history(
    world: Any, adapter: TorchAdapter, records_history: bool
) -> None:
    world.takes_include_traces, world.records_history = False, records_history
    (pool,) = adapter.read(exact=True)
    assert pool.reclaimable.exactness == ("interval" if records_history else "exact")
    assert ("snapshot" in world.calls) is not records_history


def test_snapshots_of_too_many_blocks_are_skipped(world: Any, adapter: TorchAdapter) -> None:
    world.segments.append(Segment([(512, ACTIVE)] * 50_001))
    adapter.read(exact=True)
    assert "snapshot" not in world.calls


@pytest.mark.parametrize("where", ["environment", "settings"])
def test_configured_expandable_segments_are_an_interval(world: Any, where: str) -> None:
    world.reset(segments=[Segment([(20, FREE)])])
    conf = "max_split_size_mb:64,expandable_segments:True"
    world.settings = conf if where == "settings" else ""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": conf} if where == "environment" else {}
    (pool,) = TorchAdapter(torch, environ).read()
    assert pool.reclaimable == Reclaimable(0, 20, 20, "interval")


def test_stream_ordered_backend_has_no_pool(world: Any, adapter: TorchAdapter) -> None:
    world.backend = "cudaMallocAsync"
    (pool,) = adapter.read(exact=True)
    assert pool.reclaimable == Reclaimable(0, 50 * MIB, 50 * MIB, "interval")
    assert (pool.ooms, pool.device_allocations, pool.live_allocations) == (None, None, None)


def test_allocator_of_another_library_is_not_reported_by_pytorch(world: Any, adapter: TorchAdapter) -> None:
    world.backend = "pluggable"
    assert adapter.read() == ()
    with pytest.raises(FlushRefused, match="pluggable"):
        adapter.flush(("cache",))


@pytest.mark.parametrize(
    ("statistics", "pools"),
    [
        ({"allocated_bytes": 96, "active_bytes": 64}, (HostPool("torch", 64, 96),)),
        ({"allocated_bytes": 0, "active_bytes": 0}, ()),
        (None, ()),
    ],
)
def test_pinned_host_memory_is_apart_from_the_devices(
    world: Any, adapter: TorchAdapter, statistics: dict[str, int] | None, pools: tuple[HostPool, ...]
) -> None:
    world.host = statistics
    assert tuple(adapter.host_pools()) == pools
    assert [pool.held_bytes for pool in adapter.read()] == [62 * MIB]
    world.initialized = False
    assert adapter.host_pools() == ()
