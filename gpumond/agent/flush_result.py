"""What a flush is judged by: its pools before and after. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gpumond.model.pools import Expected, Held, Outcome, PoolUsage, Reclaimable, StepResult
from gpumond.protocol.messages import PoolChange

RETURNING = frozenset(("spill", "cache", "trim"))
"""Steps that give bytes back to the driver; the others only make them returnable."""

RELEASING = frozenset(("gc", "hooks", "spill", "ipc", "workspaces"))
"""Steps that may lower the live bytes."""

UNFORESEEN = frozenset(("gc", "workspaces"))
"""Steps of which nothing tells beforehand what they free."""

REFUSED = "refused: "
"""How the detail of a step begins that was not carried out, being unsafe now."""


def judge(released: int, expected: Expected) -> Outcome:
    if released <= 0:
        return "nothing"
    return "freed" if released >= expected.low else "partial"


def released_bytes(change: PoolChange) -> int:
    return change.before.held_bytes - change.after.held_bytes


def raced(before: PoolUsage, after: PoolUsage, steps: Sequence[str]) -> bool:
    """Whether the program allocated or freed meanwhile, by what the steps themselves cannot have done."""
    allocated = (after.device_allocations or 0) > (before.device_allocations or 0)
    grew = after.live_bytes > before.live_bytes
    shrank = after.live_bytes < before.live_bytes and not RELEASING.intersection(steps)
    return allocated or grew or shrank


def planned(before: Iterable[PoolUsage], steps: Sequence[str], hooked: int | None = 0) -> tuple[PoolChange, ...]:
    before = tuple(before)
    return tuple(
        PoolChange(pool, pool, promise) for pool, promise in zip(before, promises(before, steps, hooked), strict=True)
    )


def changes(
    before: Iterable[PoolUsage], after: Iterable[PoolUsage], steps: Sequence[str], hooked: int | None = 0
) -> tuple[PoolChange, ...]:
    before, now = tuple(before), {pool.device_uuid: pool for pool in after}
    return tuple(
        _change(pool, now.get(pool.device_uuid), steps, promise)
        for pool, promise in zip(before, promises(before, steps, hooked), strict=True)
    )


def promises(pools: Sequence[PoolUsage], steps: Sequence[str], hooked: int | None) -> list[Expected]:
    """What the steps return of each pool. ``hooked``: the bytes that the program's own functions free of all of them
    together, None if one of these does not say it; it is shared out by live bytes."""
    live = sum(pool.live_bytes for pool in pools)
    return [
        expected(pool, steps, hooked if not hooked or not live else hooked * pool.live_bytes // live) for pool in pools
    ]


def expected(pool: PoolUsage, steps: Sequence[str], hooked: int | None = 0) -> Expected:
    """What the steps return of one pool. What is spilled is live, and hence not among what is reclaimable.

    Where a step cannot tell what it frees, all that is held may come back, and nothing of it is likely.
    """
    spilled = (pool.spillable_bytes or 0) if "spill" in steps else 0
    cached, low, likely, high = pool.reclaimable, 0, 0, 0
    if RETURNING.intersection(steps) - {"spill"}:
        low, likely, high = cached.low, cached.likely, cached.high
    if spilled:
        likely, high = likely + spilled, high + spilled
    if cached.exactness == "not_releasable":
        return Expected(low, likely, high, cached.exactness)
    if (hooked is None and "hooks" in steps) or (pool.live_bytes and UNFORESEEN.intersection(steps)):
        high = max(high, pool.held_bytes)
    if hooked and "hooks" in steps:
        likely, high = min(pool.held_bytes, likely + hooked), max(high, min(pool.held_bytes, high + hooked))
    return Expected(low, likely, high, "exact" if low == high else "interval")


def held(pool: PoolUsage) -> Held:
    return Held(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, None)


def conclude(
    done: Sequence[StepResult], change: Sequence[PoolChange], asked: Sequence[str], allocator: str
) -> tuple[Outcome, str]:
    """Outcome and reason of a flush that came to its end."""
    refused = [f"{step.step} {step.detail}" for step in done if step.detail.startswith(REFUSED)]
    if not done:
        return "nothing", f"{allocator} has none of the steps {', '.join(asked)}"
    if len(refused) == len(done):
        return "refused", "; ".join(refused)
    low = sum(each.expected.low for each in change)
    return judge(sum(map(released_bytes, change)), Expected(low, low, low)), "; ".join(refused)


def _change(before: PoolUsage, after: PoolUsage | None, steps: Sequence[str], promise: Expected) -> PoolChange:
    if after is None:  # the pool itself is gone
        after = replace(before, live_bytes=0, held_bytes=0, reclaimable=Reclaimable(0, 0, 0), stranded_bytes=0)
    return PoolChange(before, after, promise, raced(before, after, steps))
