"""What a trim leaves of a stream-ordered pool: the granules in which something lives. Pure.

The driver takes memory for such a pool in granules of 32 MiB and gives back the empty ones. It documents neither: it
was seen in each of 120 random histories (``python -m bench.gpu_histories``), as was that it counts as used exactly the
bytes that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

GRANULE = 32 << 20

Blocks = Mapping[int, int]
"""Address -> bytes."""


def left_free_bytes(used: int, kinds: Sequence[Blocks]) -> int | None:
    """The free bytes that stay. ``kinds`` are the blocks of each kind of owner; one or several of them use the pool.

    None unless those come to the bytes that the pool counts as used: some are not among the blocks then.
    """
    for blocks in _together(kinds):
        if sum(blocks.values()) == used:
            return GRANULE * len(set(_touched(blocks))) - used
    return None


def _together(kinds: Sequence[Blocks]) -> Iterator[Blocks]:
    for count in range(len(kinds) + 1):
        for chosen in combinations(kinds, count):
            yield {address: size for blocks in chosen for address, size in blocks.items()}


def _touched(blocks: Blocks) -> Iterable[int]:
    for address, size in blocks.items():
        yield from range(address // GRANULE, -(-(address + size) // GRANULE))
