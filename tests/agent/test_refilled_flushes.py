"""Refilled flushes: half of the flushed memory is allocated from the driver again within ten seconds."""

from __future__ import annotations

import pytest

from gpumond.agent.flushing import RefilledFlushes
from gpumond.facts.messages import PoolChange
from gpumond.facts.pools import Expected, PoolUsage
from tests.helpers.agents import GIB
from tests.helpers.values import make_pool


def pool(held: int, device_allocations: int | None = 5, device: str = "GPU-a") -> PoolUsage:
    return make_pool(device, live=held * GIB, device_allocations=device_allocations)


def flushed(before: int = 10, after: int = 2, device_allocations: int | None = 5) -> RefilledFlushes:
    counter = RefilledFlushes()
    change = PoolChange(pool(before, device_allocations), pool(after, device_allocations), Expected(0, 0, 0))
    counter.flushed([change], now=100.0)
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
    (counted,) = flushed().counted([reported], now)
    assert counted.refilled_flushes == refilled_flushes


def test_allocator_that_does_not_count_its_allocations_is_judged_by_its_bytes() -> None:
    (counted,) = flushed(device_allocations=None).counted([pool(6, None)], 101.0)
    assert counted.refilled_flushes == 1


def test_refilled_flush_is_counted_once_and_the_count_stays() -> None:
    counter = flushed()
    counts = [
        next(iter(counter.counted([pool(held, held)], now))).refilled_flushes
        for now, held in [(101, 9), (102, 9), (900, 1)]
    ]
    assert counts == [1, 1, 1]


def test_flush_that_released_nothing_cannot_be_refilled() -> None:
    (counted,) = flushed(before=2, after=2).counted([pool(9, 9)], 101.0)
    assert counted.refilled_flushes == 0
