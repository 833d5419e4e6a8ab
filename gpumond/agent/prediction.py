"""The bytes that a flush of one allocator will release, and the free bytes that it won't: stranded ones. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.messages import PoolChange
from gpumond.facts.pools import ExpectedRelease, PoolUsage, Reclaimable

RELEASING_STEPS = frozenset(("spill", "cache", "trim"))
"""Steps that return bytes to the driver; the other steps only make bytes returnable."""

UNPREDICTABLE_STEPS = frozenset(("gc", "workspaces", "plans"))
"""Steps whose effect is unknown beforehand."""


def predict_pools(pools: Sequence[PoolUsage], steps: Sequence[str], hook_bytes: int | None) -> list[ExpectedRelease]:
    """Return the bytes that the steps return of each pool.

    ``hook_bytes``: the bytes that the program's functions free of all pools together, None if unknown. Each pool gets
    a part in proportion to its live bytes.
    """
    live = sum(pool.live_bytes or 0 for pool in pools)
    return [
        predict_pool(
            pool, steps, hook_bytes if not hook_bytes or not live else hook_bytes * (pool.live_bytes or 0) // live
        )
        for pool in pools
    ]


def predict_pool(pool: PoolUsage, steps: Sequence[str], hook_bytes: int | None = 0) -> ExpectedRelease:
    """Return the bytes that the steps return of one pool. Spillable bytes are live, and so not in ``reclaimable``.

    If the effect of a step is unknown, the high value is all held bytes, and the likely value does not change.
    """
    spillable = (pool.spillable_bytes or 0) if "spill" in steps else 0
    reclaimable, low, likely, high = pool.reclaimable, 0, 0, 0
    if RELEASING_STEPS.intersection(steps) - {"spill"}:
        low, likely, high = reclaimable.low, reclaimable.likely, reclaimable.high
    if spillable:
        likely, high = likely + spillable, high + spillable
    if reclaimable.exactness == "not_releasable":
        return ExpectedRelease(low, likely, high, reclaimable.exactness)
    if (hook_bytes is None and "hooks" in steps) or (pool.live_bytes != 0 and UNPREDICTABLE_STEPS.intersection(steps)):
        high = max(high, pool.held_bytes)
    if hook_bytes and "hooks" in steps:
        likely, high = min(pool.held_bytes, likely + hook_bytes), max(high, min(pool.held_bytes, high + hook_bytes))
    return ExpectedRelease(low, likely, high, "exact" if low == high else "interval")


class BytesAfterFlush(NamedTuple):
    """A pool just after a flush."""

    free_bytes: int
    live_bytes: int


class StrandedEstimate:
    """Stranded bytes of pools whose allocators do not report them.

    The adapter may compute them from the blocks in use. Otherwise the last flush shows them: the blocks in use around
    the free bytes that it left hold these bytes, until they are freed themselves.
    """

    def __init__(self) -> None:
        self._remainders: dict[tuple[str, str], BytesAfterFlush] = {}

    def add_changes(self, changes: Iterable[PoolChange], steps: Iterable[str]) -> None:
        """Record the free bytes that a flush left, without those that were certainly returnable before it: something
        else kept them, such as work in progress. After a flush during which the program allocated or freed, they may
        be bytes that the program has cached since.
        """
        if not RELEASING_STEPS.intersection(steps) - {"spill"}:
            return
        for change in changes:
            before, after = change.before, change.after
            if before.live_bytes is None or after.live_bytes is None or change.raced or not _is_stranded_unknown(after):
                continue
            uncertain = before.held_bytes - before.live_bytes - before.reclaimable.low
            free = min(after.held_bytes - after.live_bytes, max(0, uncertain))
            self._remainders[after.allocator, after.device_uuid] = BytesAfterFlush(free, after.live_bytes)

    def adjust(
        self, pools: Sequence[PoolUsage], bytes_left_by_flush: Mapping[str, int] | None = None
    ) -> Sequence[PoolUsage]:
        """Return the pools with the bytes that a flush would likely leave counted as stranded.

        ``bytes_left_by_flush``: these bytes by device UUID, where the adapter knows them.
        """
        if not bytes_left_by_flush and not self._remainders:
            return pools
        left_by_uuid = bytes_left_by_flush or {}
        return [self._adjust_pool(pool, left_by_uuid.get(pool.device_uuid, self._estimate(pool))) for pool in pools]

    def _estimate(self, pool: PoolUsage) -> int | None:
        remainder = self._remainders.get((pool.allocator, pool.device_uuid))
        if remainder is None or pool.live_bytes is None:
            return None
        return remainder.free_bytes * min(remainder.live_bytes, pool.live_bytes) // max(1, remainder.live_bytes)

    def _adjust_pool(self, pool: PoolUsage, stranded: int | None) -> PoolUsage:
        if stranded is None or not _is_stranded_unknown(pool):
            return pool
        reported = pool.reclaimable
        likely = min(reported.likely, max(reported.low, reported.high - stranded))
        return replace(
            pool,
            reclaimable=Reclaimable(reported.low, likely, reported.high, reported.exactness),
            stranded_bytes=pool.stranded_bytes + reported.likely - likely,
        )


def _is_stranded_unknown(pool: PoolUsage) -> bool:
    return pool.reclaimable.exactness == "interval" and pool.held_known
