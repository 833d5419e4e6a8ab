"""Decisions of the flush step ``engine``: idle or not, enough memory or not, and the result of a release. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumond.engines.spec import Lever
from gpumond.errors import EngineError, EngineRejected, EngineTimeout
from gpumond.model.engines import EngineState
from gpumond.model.pools import Expected, Outcome, Receipt
from gpumond.model.process import ProcessKey
from gpumond.model.units import human

MARGIN_BYTES = 1 << 30
"""Memory of the host or device that must remain free."""

TOLERANCE_BYTES = 1 << 20
FREED_RATIO = 0.9
"""The part of the likely bytes from which a release is complete."""

RELEASED: tuple[Outcome, ...] = ("freed", "partial", "gone", "timeout")
"""Outcomes after which an engine may have less memory than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Processes of an engine, and the driver's count of their bytes by device."""

    listeners: frozenset[ProcessKey] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    used: Mapping[str, int]
    free: Mapping[str, int]
    problem: str = ""

    @property
    def total(self) -> int:
        return sum(self.used.values())

    def counts(self, other: EngineMemory) -> bool:
        """Return False if the driver has not answered for a device on which the other counts memory."""
        return other.used.keys() <= self.used.keys()

    @property
    def listener(self) -> ProcessKey:
        """The process that names the engine in receipts; the oldest, if several share the socket."""
        return min(self.listeners, key=lambda key: (key.start_ticks or 0, key.pid), default=ProcessKey(0, None))


def obstacle(lever: Lever, states: Sequence[EngineState]) -> str:
    """Return the reason why the engine is not idle in consecutive states; empty if it is."""
    last = states[-1]
    if last.obstacle:
        return last.obstacle
    if last.requests:
        return f"{last.running or 0} requests run and {last.waiting or 0} wait"
    if last.requests is None and not lever.waits:
        return "its requests are unknown, and the release would not wait for them"
    if any(before.work != after.work for before, after in pairwise(states)):
        return "it served a request during the check"
    return ""


def memory_obstacle(lever: Lever, expected: Expected, available: int | None) -> str:
    """Return the reason why the memory that moves to the host may not fit there; empty if it does."""
    if not lever.moves_to_host:
        return ""
    if available is None:
        return "its memory moves to the host, whose free memory is unknown"
    if available < expected.high + MARGIN_BYTES:
        return (
            f"up to {human(expected.high)} move to the host, where {human(available)} are available; "
            f"{human(MARGIN_BYTES)} must remain"
        )
    return ""


def verdict(
    lever: Lever,
    expected: Expected,
    before: EngineMemory,
    after: EngineMemory,
    ended: Iterable[ProcessKey],
    error: EngineError | None,
) -> tuple[Outcome, str]:
    """Return outcome and reason of a release. The driver's count decides, and never the engine's answer alone."""
    released, over = before.total - after.total, frozenset(ended)
    if before.listeners <= over:
        return "failed", "the server ended after the call; see its log"
    if not after.counts(before):
        return "timeout", "the driver does not answer, so the release is not confirmed"
    if isinstance(error, EngineTimeout):
        return "timeout", f"{error}; the call may still be in progress, and is not repeated"
    if over & before.processes and not lever.ends_holder:
        pids = ", ".join(str(key.pid) for key in sorted(over & before.processes))
        return "failed", f"process {pids} of the engine ended after the call; see its log"
    if error is not None and released <= TOLERANCE_BYTES:
        return ("refused" if isinstance(error, EngineRejected) else "failed"), str(error)
    if released <= TOLERANCE_BYTES:
        more = f", {human(-released)} more than before" if released < -TOLERANCE_BYTES else ""
        return "nothing", f"the engine answered, but the driver still counts {human(after.total)}{more}"
    notes = [str(error)] if error is not None else []
    if released < FREED_RATIO * expected.likely or error is not None:
        return "partial", "; ".join([*notes, f"the driver counts {human(released)} of {human(expected.likely)} less"])
    return ("gone" if lever.ends_holder and over & before.processes else "freed"), ""


def part_of(expected: Expected, part: int, whole: int) -> Expected:
    """Return the estimate for one device, in proportion to its part of the engine's memory."""
    low, likely, high = (size * part // max(1, whole) for size in (expected.low, expected.likely, expected.high))
    return Expected(low, likely, high, expected.exactness)


def outstanding(receipts: Iterable[Receipt], name: str, listener: ProcessKey) -> tuple[Receipt, ...]:
    """Return the receipts of the last release of this engine, oldest first; none if it has been undone since, or if
    the server is another process.
    """
    last: list[Receipt] = []
    for receipt in receipts:
        if receipt.workload != name or receipt.lever is None:
            continue
        if receipt.outcome == "woken":
            last = []
        elif receipt.outcome in RELEASED:
            last = [each for each in last if each.started_at == receipt.started_at] + [receipt]
    return tuple(each for each in last if ProcessKey(each.pid, each.start_ticks) == listener)


def shortage(receipts: Iterable[Receipt], free: Mapping[str, int]) -> str:
    """Return the reason why the released memory does not fit on its devices any more; empty if it does."""
    for receipt in receipts:
        if receipt.device_uuid is not None:
            needed, available = max(0, receipt.released_bytes) + MARGIN_BYTES, free.get(receipt.device_uuid)
            if available is None or available < needed:
                has = "an unknown number of bytes is" if available is None else f"{human(available)} are"
                return f"it needs {human(needed)} on device {receipt.device_uuid}, where {has} free"
    return ""


def last_wake_seconds(receipts: Iterable[Receipt], name: str) -> float | None:
    """Return the duration of the last wake of this engine; None if gpumond has not woken it yet."""
    seconds = None
    for receipt in receipts:
        if receipt.workload == name and receipt.outcome == "woken":
            seconds = receipt.duration_seconds
    return seconds
