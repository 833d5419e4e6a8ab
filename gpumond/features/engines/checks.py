"""Decisions of the flush step ``engine``: idle or not, enough memory or not, and the result of a release. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumond.facts.engines import EngineState
from gpumond.facts.errors import EngineError, EngineRejected, EngineTimeout
from gpumond.facts.pools import ENGINE_STEP, Expected, Outcome, Receipt
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import ProcessUsage
from gpumond.facts.units import human
from gpumond.features.engines.spec import Lever

MARGIN_BYTES = 1 << 30
"""Memory of the host or device that must remain free."""

TOLERANCE_BYTES = 1 << 20
FREED_RATIO = 0.9
"""The part of the likely bytes from which a release is complete."""
USEFUL_RATIO = 0.05
"""The part of an engine's memory below which a release is not worth a server that does not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Processes of an engine, and the driver's count of their bytes by device. ``uid``: the user of the listeners.

    ``use_ratio``: the driver's utilisation of a device by the busiest of the processes; None if it is unknown.
    """

    listeners: frozenset[ProcessKey] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    used: Mapping[str, int]
    free: Mapping[str, int]
    uid: int | None = None
    use_ratio: float | None = None
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


def use_of(processes: Iterable[ProcessUsage]) -> float | None:
    """Return the utilisation of a device by the busiest of the processes; None if that of an idle one is unknown."""
    ratios = [process.utilization_ratio for process in processes]
    known = [ratio for ratio in ratios if ratio is not None]
    return max(known) if known and (any(known) or len(known) == len(ratios)) else None


def obstacle(lever: Lever, states: Sequence[EngineState], uses: Sequence[float | None]) -> str:
    """Return the reason why the engine is not idle in consecutive states; empty if it is.

    ``uses``: the driver's utilisation of a device by its processes in the meantime. An engine that does not state its
    requests is idle only if the driver states that its processes are; one that completes them, and that serves on
    after the release, needs neither.
    """
    last = states[-1]
    if last.obstacle:
        return last.obstacle
    if last.requests:
        return f"{last.running or 0} requests run and {last.waiting or 0} wait"
    if any(before.work != after.work for before, after in pairwise(states)):
        return "it served a request during the check"
    if busiest := max((use for use in uses if use), default=0.0):
        return f"its processes use the device ({busiest:.0%}): a request may be running"
    if last.requests is None and None in uses and (lever.stops_service or not lever.waits):
        reason = f" ({last.without_counts})" if last.without_counts else ""
        return f"its running requests are unknown{reason}, and the driver does not report the use of its processes"
    return ""


def replaced(before: EngineMemory, now: EngineMemory) -> str:
    """Return the reason why the engine's server is not the one of before; empty if it is."""
    return "" if now.listeners == before.listeners else now.problem or "its server was replaced during the check"


def memory_obstacle(lever: Lever, most: int, available: int | None) -> str:
    """Return the reason why the memory that moves to the host, ``most`` bytes, may not fit there; empty if it does."""
    if not lever.moves_to_host:
        return ""
    if available is None:
        return "its memory moves to the host, whose free memory is unknown"
    if available < most + MARGIN_BYTES:
        return (
            f"up to {human(most)} move to the host, where {human(available)} are available; "
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
    if released < max(FREED_RATIO * expected.likely, USEFUL_RATIO * before.total) or error is not None:
        return "partial", "; ".join([*notes, f"the driver counts {human(released)} of {human(expected.likely)} less"])
    return ("gone" if lever.ends_holder and over & before.processes else "freed"), ""


def part_of(expected: Expected, part: int, whole: int) -> Expected:
    """Return the estimate for one device, in proportion to its part of the engine's memory."""
    low, likely, high = (size * part // max(1, whole) for size in (expected.low, expected.likely, expected.high))
    return Expected(low, likely, high, expected.exactness)


def outstanding(receipts: Iterable[Receipt], name: str) -> tuple[Receipt, ...]:
    """Return the receipts of the last release that was sent to this engine, oldest first; none if it has been undone
    since.

    Whatever the outcome, the server may have less memory than before, or be paused.
    """
    last: list[Receipt] = []
    for receipt in receipts:
        if receipt.workload != name or receipt.lever is None:
            continue
        if receipt.outcome == "woken":
            last = []
        elif any(step.step == ENGINE_STEP for step in receipt.steps):
            last = [each for each in last if each.started_at == receipt.started_at] + [receipt]
    return tuple(last)


def useless(receipts: Sequence[Receipt]) -> bool:
    """Return True if a release has returned too little to keep a server out of service for it."""
    if all(receipt.outcome in ("freed", "partial", "gone") for receipt in receipts):
        held = sum((receipt.before.driver_used_bytes or 0) if receipt.before else 0 for receipt in receipts)
        return sum(receipt.released_bytes for receipt in receipts) < USEFUL_RATIO * held
    return bool(receipts)


def missing(receipts: Iterable[Receipt], used: Mapping[str, int]) -> dict[str, int]:
    """Return, by device, the bytes that the driver counts less for an engine than before its release."""
    found: dict[str, int] = {}
    for receipt in receipts:
        if receipt.device_uuid is not None and receipt.before is not None:
            before = receipt.before.driver_used_bytes or 0
            found[receipt.device_uuid] = max(0, before - used.get(receipt.device_uuid, 0))
    return found


def shortage(needed: Mapping[str, int], free: Mapping[str, int]) -> str:
    """Return the reason why missing memory does not fit on its devices any more; empty if it does."""
    for uuid, size in needed.items():
        available = free.get(uuid)
        if size > TOLERANCE_BYTES and (available is None or available < size + MARGIN_BYTES):
            has = "an unknown number of bytes is" if available is None else f"{human(available)} are"
            return f"it needs {human(size + MARGIN_BYTES)} on device {uuid}, where {has} free"
    return ""


def last_released(receipts: Iterable[Receipt], name: str, lever: str) -> int:
    """Return the bytes of the last complete release of this engine with this lever; 0 without one."""
    sizes: dict[float, int] = {}
    for receipt in receipts:
        if (receipt.workload, receipt.lever, receipt.outcome) == (name, lever, "freed"):
            sizes[receipt.started_at] = sizes.get(receipt.started_at, 0) + receipt.released_bytes
    return next(reversed(sizes.values()), 0)


def last_wake_seconds(receipts: Iterable[Receipt], name: str) -> float | None:
    """Return the duration of the last wake of this engine; None if gpumond has not woken it yet."""
    seconds = None
    for receipt in receipts:
        if receipt.workload == name and receipt.outcome == "woken":
            seconds = receipt.duration_seconds
    return seconds
