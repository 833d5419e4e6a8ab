"""Receipts of flushes: released bytes as the agent reports them, and as the driver counts them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.errors import CONDITIONS
from gpumond.facts.messages import FlushResult, PoolChange
from gpumond.facts.pools import Expected, Held, Outcome, PoolUsage, Receipt
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport
from gpumond.facts.units import human


class DriverCounts(NamedTuple):
    """Driver's count for one process and the device's size in bytes, by device. Unknown is absent."""

    used: Mapping[str, int]
    sizes: Mapping[str, int]


def of_reported(
    result: FlushResult, allocator: str, reported: Iterable[PoolUsage], steps: Sequence[str]
) -> FlushResult:
    """Return the agent's answer, limited to reported pools and requested steps, each once."""
    known = {pool.device_uuid for pool in reported if pool.allocator == allocator}
    pools: dict[str, PoolChange] = {}
    for change in result.pools:
        device = change.before.device_uuid
        if device in known and device == change.after.device_uuid and change.before.allocator == allocator:
            pools.setdefault(device, change)
    done = {step.step: step for step in reversed(result.steps) if step.step in steps}
    return replace(result, pools=tuple(pools.values()), steps=tuple(done[step] for step in steps if step in done))


def had_effect(result: FlushResult) -> bool:
    """Return True if a flush changed anything, so that the cooldown starts."""
    return result.outcome in ("freed", "partial", "failed") or any(
        change.after.held_bytes < change.before.held_bytes
        or (change.after.live_bytes or 0) < (change.before.live_bytes or 0)
        for change in result.pools
    )


def has_changed_around(change: PoolChange, reports: Iterable[PoolUsage]) -> bool:
    """Return True if the program allocated or freed device memory just before or after the flush.

    The driver is read a moment before and a moment after the agent reads its pools. ``reports`` are the agent's
    reports around both: if they differ from its pools, the program changed its memory in between.
    """
    known_states = {_allocation_state(change.before), _allocation_state(change.after)}
    pool = (change.before.allocator, change.before.device_uuid)
    return any(
        _allocation_state(own) not in known_states for own in reports if (own.allocator, own.device_uuid) == pool
    )


def verify(
    receipt: Receipt,
    result: FlushResult,
    change: PoolChange,
    has_changed: bool,
    before: DriverCounts,
    after: DriverCounts,
) -> Receipt:
    """Make the receipt of one pool: the bytes that its allocator released, and those that the driver counts as
    released.

    The driver decides: memory that an allocator reports as freed and that the driver still counts for the process
    was freed in part, unless the program allocated meanwhile. An impossible release counts as 0, and the reason
    states it.
    """
    device = change.before.device_uuid
    stated = change.before.held_bytes - change.after.held_bytes
    driver_before, driver_after = before.used.get(device), after.used.get(device)
    if change.before.managed:  # not part of the driver's count for the process
        driver_before = driver_after = None
    driver_released = None if driver_before is None or driver_after is None else driver_before - driver_after
    raced = change.raced or (has_changed and driver_released not in (None, stated))
    outcome, reason = result.outcome, result.reason
    released, doubt = _possible(stated, driver_before, before.sizes.get(device))
    if doubt:
        outcome = "nothing" if outcome in ("freed", "partial") else outcome
        reason = "; ".join(filter(None, (reason, doubt)))
    elif outcome == "freed" and driver_released is not None and driver_released < released and not raced:
        counted = human(driver_released)
        outcome, reason = "partial", f"the driver counts only {counted} of {human(released)} as released"
    if change.before.live_bytes is None:
        reason = "; ".join(filter(None, (reason, CONDITIONS["live_unknown"])))
    planned = outcome == "planned"
    return replace(
        receipt,
        device_uuid=device,
        outcome=outcome,
        reason=reason,
        expected=change.expected,
        released_bytes=released,
        driver_released_bytes=None if planned else driver_released,
        before=_held(change.before, driver_before),
        after=None if planned else _held(change.after, driver_after),
        steps=result.steps,
        raced=raced,
    )


def of_driver(receipt: Receipt, before: DriverCounts, after: DriverCounts) -> list[Receipt]:
    """Make the receipts of functions of a program without pools, by device: only the driver counts their effect."""
    if receipt.outcome != "nothing" or not receipt.steps:
        return [receipt]
    made = []
    for device, used in sorted(before.used.items()):
        left = after.used.get(device)
        released = None if left is None else used - left
        outcome: Outcome = "freed" if released and released > 0 else "nothing"
        own = replace(receipt, device_uuid=device, outcome=outcome, driver_released_bytes=released)
        made.append(replace(own, released_bytes=max(0, released or 0)))
    return made or [receipt]


def _possible(stated: int, driver_used: int | None, size: int | None) -> tuple[int, str]:
    """Return the bytes that count as released, and the reason if they differ from the agent's."""
    if stated < 0:
        return 0, f"the pool holds {human(-stated)} more than before"
    if driver_used is not None and stated > driver_used:
        return 0, _impossible(stated, f"the driver counted only {human(driver_used)} before")
    if size is not None and stated > size:
        return 0, _impossible(stated, f"the device has only {human(size)}")
    return stated, ""


def _impossible(stated: int, bound: str) -> str:
    return f"the agent states that {human(stated)} were released, but {bound}; this does not count as released"


def with_thrash(receipt: Receipt, before: AgentReport | None, after: AgentReport | None) -> Receipt:
    """Return the receipt, with a note if the agent observed that the program allocated its memory again."""
    if before is None or after is None or _thrashes(receipt, after) <= _thrashes(receipt, before):
        return receipt
    reasons = (receipt.reason, "thrash: the program allocated half of it or more again at once")
    return replace(receipt, reason="; ".join(filter(None, reasons)))


def _thrashes(receipt: Receipt, report: AgentReport) -> int:
    own = (receipt.allocator, receipt.device_uuid)
    return sum(pool.thrashes for pool in report.pools if (pool.allocator, pool.device_uuid) == own)


def _allocation_state(pool: PoolUsage) -> tuple[int | None, ...]:
    return pool.held_bytes, pool.device_allocations, pool.device_frees


def _held(pool: PoolUsage, driver_used: int | None) -> Held:
    return Held(pool.held_bytes, pool.live_bytes, pool.reclaimable.likely, driver_used)


PLANS_OF_ONE = 8
REQUESTERS = 64

Pool = tuple[ProcessKey, str | None, str | None]
"""Process, allocator and device"""

Promises = Mapping[Pool, Expected]


def pool_of(receipt: Receipt) -> Pool:
    return ProcessKey(receipt.pid, receipt.start_ticks), receipt.allocator, receipt.device_uuid


class Plans:
    """Newest plans of each requester, so that no requester's plans displace another's."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Promises]] = {}

    def keep(self, requested_by: str, plan: str, receipts: Iterable[Receipt]) -> None:
        own = self._of.pop(requested_by, {})
        own[plan] = {pool_of(receipt): receipt.expected for receipt in receipts if receipt.expected}
        self._of[requested_by] = dict([*own.items()][-PLANS_OF_ONE:])
        if len(self._of) > REQUESTERS:
            del self._of[next(iter(self._of))]

    def promises(self, requested_by: str, plan: str | None) -> Promises:
        """Return the estimates of a plan; empty if it is unknown or expired."""
        return self._of.get(requested_by, {}).get(plan or "", {})
