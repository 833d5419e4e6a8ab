"""The prediction of a flush: the bytes that its steps return of each pool. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.facts.pools import Expected, PoolUsage

RETURNING = frozenset(("spill", "cache", "trim"))
"""Steps that return bytes to the driver; the other steps only make bytes returnable."""

UNPREDICTABLE = frozenset(("gc", "workspaces", "plans"))
"""Steps whose effect is unknown beforehand."""


def promises(pools: Sequence[PoolUsage], steps: Sequence[str], hook_bytes: int | None) -> list[Expected]:
    """Return the bytes that the steps return of each pool.

    ``hook_bytes``: the bytes that the program's functions free of all pools together, None if unknown. Each pool gets
    a part in proportion to its live bytes.
    """
    live = sum(pool.live_bytes or 0 for pool in pools)
    return [
        expected(pool, steps, hook_bytes if not hook_bytes or not live else hook_bytes * (pool.live_bytes or 0) // live)
        for pool in pools
    ]


def expected(pool: PoolUsage, steps: Sequence[str], hook_bytes: int | None = 0) -> Expected:
    """Return the bytes that the steps return of one pool. Spillable bytes are live, and so not in ``reclaimable``.

    If the effect of a step is unknown, the high value is all held bytes, and the likely value does not change.
    """
    spilled = (pool.spillable_bytes or 0) if "spill" in steps else 0
    cached, low, likely, high = pool.reclaimable, 0, 0, 0
    if RETURNING.intersection(steps) - {"spill"}:
        low, likely, high = cached.low, cached.likely, cached.high
    if spilled:
        likely, high = likely + spilled, high + spilled
    if cached.exactness == "not_releasable":
        return Expected(low, likely, high, cached.exactness)
    if (hook_bytes is None and "hooks" in steps) or (pool.live_bytes != 0 and UNPREDICTABLE.intersection(steps)):
        high = max(high, pool.held_bytes)
    if hook_bytes and "hooks" in steps:
        likely, high = min(pool.held_bytes, likely + hook_bytes), max(high, min(pool.held_bytes, high + hook_bytes))
    return Expected(low, likely, high, "exact" if low == high else "interval")
