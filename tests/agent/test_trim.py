"""Granules of 32 MiB of a stream-ordered pool that a trim keeps because a block is in them."""

from __future__ import annotations

import pytest

from gpumond.agent.allocators.mempools import GRANULE, Blocks, retained_free_bytes

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
    assert retained_free_bytes(used, [blocks]) == granules * GRANULE - used


@pytest.mark.parametrize("missed", [1, -1, MIB])
def test_blocks_that_disagree_with_the_pools_count_are_rejected(missed: int):
    blocks = at(m0=1, m40=5)
    assert retained_free_bytes(sum(blocks.values()) + missed, [blocks]) is None


@pytest.mark.parametrize("using", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_owners_of_one_kind_or_of_several_may_use_the_pool(using: set[int]):
    kinds = [at(m0=1), at(m33=2, m70=4), at(m1=8)]
    used = sum(sum(kinds[kind].values()) for kind in using)
    together = {address: size for kind in using for address, size in kinds[kind].items()}
    assert retained_free_bytes(used, kinds) == retained_free_bytes(used, [together])


def test_block_of_two_owners_counts_once():
    assert retained_free_bytes(MIB, [at(m0=1), at(m0=1)]) == 31 * MIB
    assert retained_free_bytes(3 * MIB, [at(m0=1), at(m0=1, m2=2)]) == 29 * MIB
