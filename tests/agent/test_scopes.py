"""``scope``: bytes that a block keeps, its peak, and the exactness of both."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpumond import agent
from gpumond.agent.measure.scopes import SCOPE_TOTALS, ScopeEntry
from gpumond.agent.measure.steps import DeviceUsage, usage_by_device
from gpumond.facts.program import MAX_SCOPES, OTHER, ScopeDevice, ScopeUsage
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB
from tests.helpers.simulated import UUID
from tests.helpers.values import make_pool


def usage(name: str) -> ScopeUsage:
    return next(scope for scope in agent.program().scopes if scope.name == name)


def device(name: str) -> ScopeDevice:
    return usage(name).devices[0]


def test_block_reports_kept_and_peak_bytes(allocator: CachingAllocator):
    with agent.scope("epoch") as block:
        kept = allocator.malloc(100 * MIB)
        allocator.free(allocator.malloc(300 * MIB))
    assert (block.retained_bytes, block.retained, block.peak_bytes) == (100 * MIB, {UUID: 100 * MIB}, {UUID: 400 * MIB})
    with agent.scope("epoch") as block:
        allocator.free(kept)
    assert block.retained_bytes == -100 * MIB
    assert usage("epoch").entries == 2
    assert device("epoch") == ScopeDevice(UUID, 0, -100 * MIB, 400 * MIB, True)


def test_block_with_the_first_allocation_is_measured_from_zero(allocator: CachingAllocator):
    allocator.close()
    again = CachingAllocator(allocator._device)
    with agent.scope("setup"):
        again.malloc(64 * MIB)
    assert device("setup") == ScopeDevice(UUID, 64 * MIB, 64 * MIB, 64 * MIB, True)
    again.close()


def test_blocks_in_blocks_have_names_of_their_own(allocator: CachingAllocator):
    with agent.scope("epoch"):
        for _ in range(3):
            with agent.scope("forward"):
                allocator.malloc(10 * MIB)
        with agent.scope("forward"), agent.scope("attention"):
            pass
    with agent.scope("forward"):
        pass
    entries = {scope.name: scope.entries for scope in agent.program().scopes}
    assert entries == {"epoch": 1, "epoch/forward": 4, "epoch/forward/attention": 1, "forward": 1}
    assert device("epoch/forward").retained_bytes == device("epoch").retained_bytes == 30 * MIB


def test_peak_below_an_older_one_is_a_lower_bound(allocator: CachingAllocator):
    allocator.free(allocator.malloc(500 * MIB))
    with agent.scope("small"):
        held = allocator.malloc(20 * MIB)
        allocator.free(allocator.malloc(40 * MIB))
    assert (device("small").peak_bytes, device("small").peak_exact) == (20 * MIB, False)
    with agent.scope("sampled"):
        more = allocator.malloc(40 * MIB)
        SCOPE_TOTALS.sample(usage_by_device(agent.report()))  # as a report does, once a second
        allocator.free(more)
    assert (device("sampled").peak_bytes, device("sampled").peak_exact) == (60 * MIB, False)
    allocator.free(held)


@pytest.mark.parametrize(
    ("before", "after", "sampled", "peak", "exact"),
    [
        (DeviceUsage(10, peak_bytes=50), DeviceUsage(20, peak_bytes=80), 30, 80, True),
        (DeviceUsage(10, peak_bytes=50), DeviceUsage(20, peak_bytes=50), 30, 30, False),
        (
            DeviceUsage(50, peak_bytes=50),
            DeviceUsage(50, peak_bytes=50),
            0,
            50,
            True,
        ),  # no room between the sampled peak and the mark
        (
            DeviceUsage(10, peak_bytes=90),
            DeviceUsage(20, peak_bytes=40),
            30,
            40,
            False,
        ),  # the program has reset the peak
        (DeviceUsage(10, peak_bytes=None), DeviceUsage(20, peak_bytes=None), 30, 30, False),
        (
            DeviceUsage(10, peak_bytes=50, is_only_pool=False),
            DeviceUsage(20, peak_bytes=80, is_only_pool=False),
            30,
            30,
            False,
        ),
    ],
)
def test_peak_is_exact_or_a_lower_bound(before: DeviceUsage, after: DeviceUsage, sampled: int, peak: int, exact: bool):
    block = ScopeEntry("x", None)
    block.before = {UUID: before}
    block.sample({UUID: before})
    block.sample({UUID: DeviceUsage(sampled)})
    block.end({UUID: after})
    assert block.peaks is not None
    found = block.peaks[UUID]
    assert (found.low, found.low == found.high) == (peak, exact)


def test_pools_of_one_device_are_added_and_those_inside_another_left_out():
    pools = (
        make_pool("GPU-a", live=1, allocator="torch", peak_live_bytes=5, retries=1),
        make_pool("GPU-a", live=2, allocator="rmm", peak_live_bytes=7, retries=2),
        make_pool("GPU-a", live=2, allocator="cupy", inside="rmm"),
        make_pool("GPU-b", live=9, allocator="torch"),
    )
    assert usage_by_device(pools) == {
        "GPU-a": DeviceUsage(3, 0, 12, 3, is_only_pool=False),
        "GPU-b": DeviceUsage(9, 0, None, 0),
    }


def test_names_beyond_the_bound_are_counted_together(allocator: CachingAllocator):
    for number in range(MAX_SCOPES + 10):
        with agent.scope(f"s{number}"):
            pass
    scopes = agent.program().scopes
    assert len(scopes) == MAX_SCOPES + 1
    assert usage(OTHER).entries == 10
    with agent.scope("s0"):
        pass
    assert usage("s0").entries == 2


def test_path_that_grows_without_limit_is_other(allocator: CachingAllocator):
    def dive(depth: int) -> None:
        with agent.scope("x" * 60):
            if depth:
                dive(depth - 1)

    dive(20)
    assert {len(scope.name) for scope in agent.program().scopes} == {60, 121, len(OTHER)}


def test_retries_and_the_errors_that_end_a_block_are_counted(allocator: CachingAllocator):
    allocator.malloc(900 * MIB)
    with pytest.raises(MemoryError), agent.scope("epoch"), agent.scope("forward"):
        allocator.malloc(500 * MIB)
    for name in ("epoch", "epoch/forward"):
        assert (usage(name).ooms, usage(name).retries) == (1, 1)
    with pytest.raises(ZeroDivisionError), agent.scope("epoch"):
        raise ZeroDivisionError
    assert usage("epoch").ooms == 1


def test_flush_releases_the_blocks_cache(allocator: CachingAllocator):
    with agent.scope("evaluation", flush=True):
        allocator.free(allocator.malloc(200 * MIB))
    assert allocator.usage().held_bytes == 0


def test_decorated_function_is_a_block_at_each_call(allocator: CachingAllocator):
    @agent.scope("forward")
    def forward(size: int, *, copies: int = 1) -> int:
        """Forward."""
        return sum(allocator.malloc(size) >= 0 for _ in range(copies))

    assert (forward(10 * MIB, copies=2), forward.__name__, forward.__doc__) == (2, "forward", "Forward.")
    forward(10 * MIB)
    assert (usage("forward").entries, device("forward").retained_bytes) == (2, 30 * MIB)


def test_decorated_coroutine_function_is_a_block_until_it_ends(allocator: CachingAllocator):
    @agent.scope("request")
    async def request(size: int) -> str:
        held = allocator.malloc(size)
        await asyncio.sleep(0)
        allocator.free(held)
        with agent.scope("answer"):
            return "done"

    async def both() -> list[str]:
        return await asyncio.gather(request(10 * MIB), request(20 * MIB))

    assert asyncio.run(both()) == ["done", "done"]
    assert {scope.name: scope.entries for scope in agent.program().scopes} == {"request": 2, "request/answer": 2}


def test_threads_have_blocks_of_their_own(allocator: CachingAllocator):
    def work() -> None:
        with agent.scope("inner"):
            pass

    with agent.scope("outer"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [scope.name for scope in agent.program().scopes] == ["inner", "outer"]


def test_unmeasured_blocks_are_counted(allocator: CachingAllocator):
    """The flush of another thread holds the allocators."""
    flushing, done = threading.Event(), threading.Event()

    def hook() -> None:
        flushing.set()
        done.wait(30)

    agent.on_flush(hook)
    flush = threading.Thread(target=lambda: agent.flush(["hooks"]))
    flush.start()
    flushing.wait(30)
    with agent.scope("epoch") as block:
        allocator.malloc(10 * MIB)
    done.set()
    flush.join()
    agent._hooks.remove((hook, None))
    assert (block.retained_bytes, block.peak_bytes, block.retries) == (None, None, None)
    assert (usage("epoch").entries, usage("epoch").unmeasured, usage("epoch").devices) == (1, 1, ())


@pytest.mark.parametrize(
    ("name", "flush", "error", "says"),
    [
        ("", False, ValueError, "scope: expected 1 to 64"),
        ("two words", False, ValueError, "two words"),
        (7, False, TypeError, "scope: expected str, got int"),
        ("x", 1, TypeError, "flush: expected bool"),
    ],
)
def test_wrong_arguments_of_scope_are_named(name: str, flush: bool, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        agent.scope(name, flush)


def test_generator_function_is_refused():
    def batches():
        yield 1

    with pytest.raises(TypeError, match="use it inside the body"):
        agent.scope("x")(batches)
    with pytest.raises(TypeError, match="expected a function"):
        agent.scope("x")(3)  # type: ignore[type-var]
