"""Model of a trim of a stream-ordered pool: the granules that contain a block in use stay. Without I/O.

The driver takes memory for such a pool in granules of 32 MiB and returns the empty ones. This is not documented; it was
observed in each of 120 random histories (``python -m bench.gpu_histories``). They also showed that the driver counts
exactly the requested bytes as used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

GRANULE = 32 << 20

Blocks = Mapping[int, int]
"""Sizes in bytes by address."""


def retained_free_bytes(used: int, kinds: Sequence[Blocks]) -> int | None:
    """Return the free bytes that stay. ``kinds``: the blocks of each kind of owner; any combination may use the pool.

    None unless a combination adds up to the pool's used bytes: otherwise some blocks are unknown.
    """
    for blocks in _combined(kinds):
        if sum(blocks.values()) == used:
            return GRANULE * len(set(_touched(blocks))) - used
    return None


def _combined(kinds: Sequence[Blocks]) -> Iterator[Blocks]:
    for count in range(len(kinds) + 1):
        for selected in combinations(kinds, count):
            yield {address: size for blocks in selected for address, size in blocks.items()}


def _touched(blocks: Blocks) -> Iterable[int]:
    for address, size in blocks.items():
        yield from range(address // GRANULE, -(-(address + size) // GRANULE))
