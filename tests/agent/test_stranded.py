"""What the last flush left is taken to be stranded, where the allocator does not tell."""

from __future__ import annotations

import pytest

from gpumond.agent.flush_result import expected
from gpumond.agent.stranded import StrandedEstimate
from gpumond.model.pools import Exactness, PoolUsage, Reclaimable
from gpumond.protocol.messages import PoolChange


def pool(live: int, held: int, exactness: Exactness = "interval", allocator: str = "cupy") -> PoolUsage:
    free = held - live
    return PoolUsage(allocator, "GPU-0", live, held, Reclaimable(0, free, free, exactness), 0)


def after(change: PoolUsage, *steps: str) -> StrandedEstimate:
    remains = StrandedEstimate()
    remains.flushed([PoolChange(pool(100, 400), change, expected(change, steps))], steps)
    return remains


@pytest.mark.parametrize(
    ("live", "held", "likely"),
    [
        (100, 160, 0),  # nothing has changed: another flush returns nothing
        (100, 300, 140),  # what was freed since is whole
        (200, 300, 40),
        (50, 250, 170),  # half of the blocks that held them are gone
        (0, 200, 200),
        (100, 130, 0),
    ],
)
def test_free_bytes_that_a_flush_left_are_stranded_as_long_as_their_neighbours_live(live: int, held: int, likely: int):
    (seen,) = after(pool(100, 160), "cache").counted([pool(live, held)])
    assert seen.reclaimable == Reclaimable(0, likely, held - live, "interval")
    assert seen.live_bytes + seen.reclaimable.likely + seen.stranded_bytes == seen.held_bytes == held


@pytest.mark.parametrize("steps", [(), ("gc",), ("hooks", "spill")])
def test_what_gives_nothing_back_teaches_nothing(steps: tuple[str, ...]):
    assert after(pool(100, 160), *steps).counted([pool(100, 160)]) == [pool(100, 160)]


@pytest.mark.parametrize("told", [pool(100, 160, "exact"), pool(100, 160, allocator="rmm")])
def test_who_tells_it_himself_or_was_not_flushed_is_believed(told: PoolUsage):
    assert after(pool(100, 160), "trim").counted([told]) == [told]
