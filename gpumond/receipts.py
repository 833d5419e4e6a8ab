"""Receipts of flushes: what an agent says came back, beside what the driver saw of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpumond.model import AgentReport, Held, Outcome, PoolUsage, Receipt
from gpumond.wire import PoolChange, Result

DriverCounts = Mapping[str, int]
"""Bytes of one process by device, as the driver counts them."""


def blank(report: AgentReport, outcome: Outcome, reason: str, requested_by: str, started_at: float) -> Receipt:
    """Of a flush that no pool has answered."""
    return Receipt(
        pid=report.pid,
        workload=report.workload,
        device_uuid=None,
        allocator=None,
        outcome=outcome,
        reason=reason,
        expected=None,
        released_bytes=0,
        driver_released_bytes=None,
        before=None,
        after=None,
        steps=(),
        raced=False,
        requested_by=requested_by,
        started_at=started_at,
        duration_seconds=0.0,
    )


def moved(change: PoolChange, told: Iterable[PoolUsage]) -> bool:
    """Whether the program took or gave device memory just before or after what its agent saw of the flush.

    The driver is read a moment earlier and a moment later than that. ``told`` are the agent's reports from
    around both: if they differ from what it saw, the program did something in between.
    """
    seen = {_takings(change.before), _takings(change.after)}
    pool = (change.before.allocator, change.before.device_uuid)
    return any(_takings(own) not in seen for own in told if (own.allocator, own.device_uuid) == pool)


def verify(
    receipt: Receipt, result: Result, change: PoolChange, has_moved: bool, before: DriverCounts, after: DriverCounts
) -> Receipt:
    """The receipt of one pool: what its allocator released, beside what the driver saw.

    The driver has the last word: a pool that says it freed memory which the driver still counts to
    the process was freed in part, unless the program allocated meanwhile.
    """
    device = change.before.device_uuid
    released = change.before.held_bytes - change.after.held_bytes
    driver_before, driver_after = before.get(device), after.get(device)
    seen = None if driver_before is None or driver_after is None else driver_before - driver_after
    raced = change.raced or (has_moved and seen not in (None, released))
    outcome, reason = result.outcome, result.reason
    if outcome == "freed" and seen is not None and seen < released and not raced:
        outcome, reason = "partial", f"the driver saw {seen} of {released} released bytes come back"
    planned = outcome == "planned"
    return replace(
        receipt,
        device_uuid=device,
        outcome=outcome,
        reason=reason,
        expected=change.expected,
        released_bytes=released,
        driver_released_bytes=None if planned else seen,
        before=_held(change.before, driver_before),
        after=None if planned else _held(change.after, driver_after),
        steps=result.steps,
        raced=raced,
    )


def with_thrash(receipt: Receipt, before: AgentReport | None, after: AgentReport | None) -> Receipt:
    """The receipt, with a word on it if the program has been seen to take its memory back."""
    if before is None or after is None or _thrashes(receipt, after) <= _thrashes(receipt, before):
        return receipt
    reasons = (receipt.reason, "thrash: the program took half of it or more again at once")
    return replace(receipt, reason="; ".join(filter(None, reasons)))


def _thrashes(receipt: Receipt, told: AgentReport) -> int:
    own = (receipt.allocator, receipt.device_uuid)
    return sum(pool.thrashes for pool in told.pools if (pool.allocator, pool.device_uuid) == own)


def _takings(pool: PoolUsage) -> tuple[int | None, ...]:
    return pool.held_bytes, pool.device_allocations, pool.device_frees


def _held(pool: PoolUsage, driver_used: int | None) -> Held:
    return Held(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, driver_used)
