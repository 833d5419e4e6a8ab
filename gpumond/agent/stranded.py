"""What a flush could not return. Where an allocator does not tell which of its free bytes are stranded, its adapter may
know it from the blocks in use, or else the last flush did: free bytes that it left are held by the blocks in use around
them, and are so until those go.

Pure but for its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.agent.flush_result import RETURNING
from gpumond.model.pools import PoolUsage, Reclaimable
from gpumond.protocol.messages import PoolChange

NOTHING_TOLD: Mapping[str, int] = {}


class Left(NamedTuple):
    free_bytes: int
    live_bytes: int


class StrandedEstimate:
    def __init__(self) -> None:
        self._left: dict[tuple[str, str], Left] = {}

    def flushed(self, changes: Iterable[PoolChange], steps: Iterable[str]) -> None:
        if not RETURNING.intersection(steps) - {"spill"}:
            return
        for after in (change.after for change in changes):
            if _unknown(after):
                free = after.held_bytes - after.live_bytes
                self._left[after.allocator, after.device_uuid] = Left(free, after.live_bytes)

    def counted(self, pools: Sequence[PoolUsage], left: Mapping[str, int] = NOTHING_TOLD) -> Sequence[PoolUsage]:
        """The pools, each with what a flush would likely leave as stranded. ``left``: of the devices that tell it."""
        if not left and not self._left:
            return pools
        return [self._counted(pool, left.get(pool.device_uuid, self._learned(pool))) for pool in pools]

    def _learned(self, pool: PoolUsage) -> int | None:
        left = self._left.get((pool.allocator, pool.device_uuid))
        return left and left.free_bytes * min(left.live_bytes, pool.live_bytes) // max(1, left.live_bytes)

    def _counted(self, pool: PoolUsage, stranded: int | None) -> PoolUsage:
        if stranded is None or not _unknown(pool):
            return pool
        told = pool.reclaimable
        likely = min(told.likely, max(told.low, told.high - stranded))
        return replace(
            pool,
            reclaimable=Reclaimable(told.low, likely, told.high, told.exactness),
            stranded_bytes=pool.stranded_bytes + told.likely - likely,
        )


def _unknown(pool: PoolUsage) -> bool:
    return pool.reclaimable.exactness == "interval" and pool.held_known
