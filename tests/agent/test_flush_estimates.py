"""Estimates of a flush from the figures of the pools alone, and flushes whose memory is taken again at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond import agent
from gpumond.agent.flushing import RefilledFlushes
from gpumond.agent.prediction import StrandedEstimate, predict_pool, predict_pools
from gpumond.facts.messages import PoolChange
from gpumond.facts.pools import Exactness, ExpectedRelease, PoolUsage, Reclaimable
from tests.helpers.agents import GIB
from tests.helpers.values import make_pool

MIB = 1 << 20


def test_pool_that_is_not_releasable_promises_nothing_for_any_step() -> None:
    arena = PoolUsage(
        allocator="jax",
        device_uuid="GPU-0",
        live_bytes=50,
        held_bytes=90,
        reclaimable=Reclaimable(0, 0, 0, "not_releasable"),
        stranded_bytes=40,
    )
    assert predict_pools([arena], ("gc", "hooks", "cache"), None) == [ExpectedRelease(0, 0, 0, "not_releasable")]


def test_estimate_of_hooks_is_divided_by_live_bytes() -> None:
    pools = [
        PoolUsage(
            allocator="torch",
            device_uuid=f"GPU-{live}",
            live_bytes=live,
            held_bytes=100,
            reclaimable=Reclaimable(0, 0, 0),
            stranded_bytes=100 - live,
        )
        for live in (30, 10)
    ]
    assert [each.likely for each in predict_pools(pools, ("hooks", "cache"), 20)] == [15, 5]


@pytest.mark.parametrize(("estimate", "error"), [(-1, ValueError), ("1GiB", TypeError), (True, TypeError)])
def test_wrong_estimate_is_an_error(estimate: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="on_flush: estimate"):
        agent.on_flush(lambda: 0, estimate=estimate)  # type: ignore[call-overload]


def driver_pool(live: int, held: int, exactness: Exactness = "interval", allocator: str = "cupy") -> PoolUsage:
    free = held - live
    return PoolUsage(
        allocator=allocator,
        device_uuid="GPU-0",
        live_bytes=live,
        held_bytes=held,
        reclaimable=Reclaimable(0, free, free, exactness),
        stranded_bytes=0,
    )


def estimate_after(change: PoolUsage, *steps: str) -> StrandedEstimate:
    stranded = StrandedEstimate()
    stranded.add_changes([PoolChange(driver_pool(100, 400), change, predict_pool(change, steps))], steps)
    return stranded


@pytest.mark.parametrize(
    ("live", "held", "likely"),
    [
        (100, 160, 0),  # unchanged: another flush returns nothing
        (100, 300, 140),  # blocks freed since the flush are whole
        (200, 300, 40),
        (50, 250, 170),  # half of the blocks that held the free bytes are gone
        (0, 200, 200),
        (100, 130, 0),
    ],
)
def test_free_bytes_left_by_a_flush_are_stranded_while_their_neighbors_are_live(live: int, held: int, likely: int):
    (adjust,) = estimate_after(driver_pool(100, 160), "cache").adjust([driver_pool(live, held)])
    assert adjust.reclaimable == Reclaimable(0, likely, held - live, "interval")
    assert adjust.live_bytes + adjust.reclaimable.likely + adjust.stranded_bytes == adjust.held_bytes == held


@pytest.mark.parametrize("steps", [(), ("gc",), ("hooks", "spill")])
def test_steps_that_return_nothing_change_no_estimate(steps: tuple[str, ...]):
    pool = driver_pool(100, 160)
    assert estimate_after(pool, *steps).adjust([pool]) == [pool]


@pytest.mark.parametrize("pool", [driver_pool(100, 160, "exact"), driver_pool(100, 160, allocator="rmm")])
def test_exact_pools_and_pools_without_a_flush_are_not_adjusted(pool: PoolUsage):
    assert estimate_after(driver_pool(100, 160), "trim").adjust([pool]) == [pool]


def test_flush_during_which_the_program_allocated_teaches_nothing():
    before, after = driver_pool(100, 400), driver_pool(120, 400)
    stranded = StrandedEstimate()
    stranded.add_changes([PoolChange(before, after, predict_pool(before, ("cache",)), raced=True)], ("cache",))
    assert stranded.adjust([after]) == [after]


def test_bytes_that_were_certainly_returnable_are_not_stranded_by_a_flush_that_left_them():
    """As after a suspension: blocks wait for events of work in progress, and a flush returns nothing."""
    left = driver_pool(100, 400)
    before = replace(left, reclaimable=Reclaimable(290, 290, 300, "interval"), stranded_bytes=10)
    stranded = StrandedEstimate()
    stranded.add_changes([PoolChange(before, left, predict_pool(before, ("cache",)))], ("cache",))
    (adjust,) = stranded.adjust([left])
    assert (adjust.reclaimable.likely, adjust.stranded_bytes) == (290, 10)


def pool(held: int, device_allocations: int | None = 5, device: str = "GPU-a") -> PoolUsage:
    return make_pool(device, live=held * GIB, device_allocations=device_allocations)


def flushed(before: int = 10, after: int = 2, device_allocations: int | None = 5) -> RefilledFlushes:
    counter = RefilledFlushes()
    change = PoolChange(pool(before, device_allocations), pool(after, device_allocations), ExpectedRelease(0, 0, 0))
    counter.add_changes([change], now=100.0)
    return counter


@pytest.mark.parametrize(
    ("now", "reported", "refilled_flushes"),
    [
        pytest.param(101.0, pool(6, 6), 1, id="half of it"),
        pytest.param(101.0, pool(5, 6), 0, id="less than half"),
        pytest.param(110.0, pool(10, 9), 1, id="in the last moment"),
        pytest.param(110.1, pool(10, 9), 0, id="too late"),
        pytest.param(101.0, pool(6, 5), 0, id="the driver gave nothing"),
        pytest.param(101.0, pool(6, 6, "GPU-b"), 0, id="another device"),
    ],
)
def test_memory_that_is_taken_again_soon_refills_the_flush(
    now: float, reported: PoolUsage, refilled_flushes: int
) -> None:
    (counted,) = flushed().count_refills([reported], now)
    assert counted.refilled_flushes == refilled_flushes


def test_allocator_that_does_not_count_its_allocations_is_judged_by_its_bytes() -> None:
    (counted,) = flushed(device_allocations=None).count_refills([pool(6, None)], 101.0)
    assert counted.refilled_flushes == 1


def test_refilled_flush_is_counted_once_and_the_count_stays() -> None:
    counter = flushed()
    counts = [
        next(iter(counter.count_refills([pool(held, held)], now))).refilled_flushes
        for now, held in [(101, 9), (102, 9), (900, 1)]
    ]
    assert counts == [1, 1, 1]


def test_flush_that_released_nothing_cannot_be_refilled() -> None:
    (counted,) = flushed(before=2, after=2).count_refills([pool(9, 9)], 101.0)
    assert counted.refilled_flushes == 0
