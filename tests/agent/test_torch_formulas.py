"""Formulas of PyTorch's allocator: the prediction equals what the allocator's rules return."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpumond.agent.allocators.torch_formulas import (
    device_statistics,
    reclaimable_from_async_stats,
    reclaimable_from_snapshot,
    reclaimable_from_stats,
)
from gpumond.facts.pools import Reclaimable
from tests.agent.fakes.torch.world import ACTIVE, FREE, MIB, PENDING, Segment, World

SIZES = st.integers(1, 60 * MIB)
BLOCKS = st.lists(st.tuples(SIZES, st.sampled_from([ACTIVE, PENDING, FREE])), min_size=1, max_size=6)
SEGMENTS = st.lists(
    st.builds(Segment, BLOCKS, pool=st.sampled_from([(0, 0), (0, 1)]), expandable=st.booleans(), small=st.booleans())
)


def settled(segments: list[Segment]) -> World:
    """Merge free neighbors, as the allocator does."""
    for segment in segments:
        if not any(state == PENDING for _, state in segment.blocks):
            segment.settle()
    return World(segments)


@given(SEGMENTS)
def test_statistics_bound_what_a_flush_returns(segments: list[Segment]) -> None:
    world = settled(segments)
    mixed = any(segment.expandable for segment in segments)
    expected = reclaimable_from_stats(device_statistics(world.stats(0)), is_expandable=mixed)
    assert expected.low <= expected.likely <= expected.high
    released = world.empty_cache()
    assert expected.low <= released <= expected.high
    if expected.exactness == "exact":
        assert released == expected.likely


@given(SEGMENTS)
def test_snapshot_predicts_a_flush_exactly(segments: list[Segment]) -> None:
    world = settled(segments)
    expected = reclaimable_from_snapshot(world.snapshot()).get(0, Reclaimable(0, 0, 0))
    assert expected.likely == expected.low == world.empty_cache()
    if not any(segment.pool != (0, 0) for segment in segments):
        assert expected.exactness == "exact"


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([], Reclaimable(0, 0, 0, "exact")),
        ([Segment([(20, FREE)]), Segment([(6, ACTIVE), (14, FREE)])], Reclaimable(20, 20, 20, "exact")),
        ([Segment([(20, FREE)]), Segment([(6, PENDING), (14, FREE)])], Reclaimable(20, 26, 40, "interval")),
        ([Segment([(20, FREE)]), Segment([(20, FREE)], pool=(0, 1))], Reclaimable(20, 20, 40, "interval")),
        ([Segment([(6, ACTIVE), (14, FREE)], expandable=True)], Reclaimable(0, 14, 14, "interval")),
    ],
    ids=["nothing held", "split segments stay", "pending may unsplit", "private pools may stay", "expandable"],
)
def test_statistics_give_a_pool(segments: list[Segment], expected: Reclaimable) -> None:
    assert reclaimable_from_stats(device_statistics(World(segments).stats(0))) == expected


def test_private_pools_cannot_be_excluded_before_2_13() -> None:
    world = World([Segment([(20, FREE)])], tells_private_pools=False)
    assert reclaimable_from_stats(device_statistics(world.stats(0))) == Reclaimable(0, 20, 20, "interval")


def test_freed_range_of_an_expandable_segment_returns_its_whole_pages_only() -> None:
    blocks = [(15 * MIB, ACTIVE), (50 * MIB, FREE), (5 * MIB, ACTIVE)]
    assert reclaimable_from_snapshot(World([Segment(blocks, expandable=True)]).snapshot())[0].likely == 40 * MIB
    assert (
        reclaimable_from_snapshot(World([Segment(blocks, expandable=True)]).snapshot(), 25 * MIB)[0].likely == 25 * MIB
    )


def test_free_private_pool_may_return_or_not() -> None:
    world = World([Segment([(20, FREE)]), Segment([(8, FREE)], pool=(0, 1)), Segment([(9, FREE)], device=1)])
    assert reclaimable_from_snapshot(world.snapshot()) == {
        0: Reclaimable(20, 20, 28, "interval"),
        1: Reclaimable(9, 9, 9, "exact"),
    }


def test_stream_ordered_pool_is_not_releasable() -> None:
    stats = World([Segment([(6, ACTIVE), (14, FREE)])]).stats(0)
    assert reclaimable_from_async_stats(device_statistics(stats)) == Reclaimable(0, 14, 14, "interval")
