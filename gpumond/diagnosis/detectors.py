"""Detectors without a trend: pressure, orphan, idle holder, fragmentation, and the cause of a process's end. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import inf
from typing import NamedTuple

from gpumond.diagnosis.trend import sen
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import Ending
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage
from gpumond.facts.units import GIB, MIB, MINUTE_SECONDS, duration
from gpumond.facts.verdicts import VerdictName
from gpumond.tick.history import MAX, USED, Series

FULL = 0.95
FULL_CLEAR = 0.93

RAMP_FROM = 0.80
RAMP_BLOCKS = 4
RAMP_HELD_SECONDS = 90.0
RAMP_SECONDS = 600.0
"""Pressure also applies to a device above RAMP_FROM whose peaks will fill it within this time."""
RAMP_LARGEST_STEP = 0.75
"""Maximum share of one step in the rise of a ramp: a program that loads its model rises once and stays there."""

ORPHAN_BYTES = GIB // 2
ORPHAN_RATIO = 0.01
"""The larger of the two is the limit; a driver has some memory of its own."""
ORPHAN_SECONDS = 60.0
ORPHAN_BUSY_RATIO = 0.05
ORPHAN_BUSY_SECONDS = 300.0
"""Limits while another program uses the device: more memory and a longer time."""
FLAT_BYTES = 256 * MIB

IDLE_GAP_SECONDS = 120.0
"""Maximum distance of two readings of an idle device. A reading covers a second at most, so fewer of them miss work."""
IDLE_RATIO = 0.05

FRAGMENTED_FROM = 0.05
"""Share of the device that a pool must keep before its fragmentation is reported."""
FRAGMENTED = 0.25
FRAGMENTED_CLEAR = 0.20
FRAGMENTED_MINUTES = 10
MIN_MINUTES = 5
GROWTH_RATIO = 0.02
"""Growth of the kept bytes, as a share of the device, from which fragmentation is reported."""

NEARLY_FULL = 0.97
NEARLY_FULL_RISE = 20 * MIB
"""Growth of a nearly full device: PyTorch requests this size for allocations from 1 MiB."""
CRASH_SECONDS = 180.0
"""An end within this time after a nearly full device grew, an allocation failed or an Xid error occurred is a crash.
The end of a program that has filled its device for longer, as a serving engine does, is none.
"""
LOOP_CRASHES = 3
LOOP_SECONDS = 3600.0

MIN_SECONDS = 60.0
"""Minimum time between the two blocks that are compared."""
RISING_RATIO = 0.02
"""Limit between both cases: additional allocations would be 50 times as large as the others are on average."""
ERROR_RATIO = 0.1
"""Error of the smallest number, as a share of the range of the numbers in a block, which has about 15 samples."""

MINUTES = 60
"""Number of minutes whose peaks are kept."""


class PoolPeak(NamedTuple):
    """Peak of the minute from ``at`` on. *Kept* bytes are those that no flush returns."""

    at: float
    live: int
    kept: int


class Peaks:
    """Peaks of the last hour on one device, and times of the last retried and the last failed allocation.

    Fragmentation is measured at peaks and never at an instant, because a healthy pool also appears fragmented while its
    use is low.
    """

    __slots__ = ("_last", "_never", "_ooms", "_reported", "_rescues", "_retries", "failed_at", "minutes", "retried_at")

    def __init__(self, never: float) -> None:
        self.minutes: list[PoolPeak] = []  # an empty deque has 700 bytes, and few processes have an agent
        self.failed_at = self.retried_at = self._never = never
        self._last = PoolPeak(never, 0, 0)
        self._reported = self._ooms = self._retries = self._rescues = -1
        """Counters of the last report; counts from before the first report are not new."""

    def add(self, report: AgentReport, device_uuid: str, now: float) -> None:
        live = kept = ooms = retries = highest = 0
        for pool in report.pools:
            if pool.device_uuid == device_uuid and not pool.inside and pool.live_bytes is not None:
                live += pool.live_bytes
                kept += kept_bytes(pool) if pool.live_bytes else 0  # an empty pool is not fragmented
                highest += pool.peak_live_bytes or 0
                ooms += pool.ooms or 0
                retries += pool.retries or 0
        if highest > self._reported:
            if self._reported >= 0:
                # A reported peak that rose was reached since the last report, however short it was.
                live, kept = max(live, highest), max(kept, highest)
            self._reported = highest
        elif highest < self._reported:
            self._reported = highest
        if ooms > self._ooms:
            self.failed_at = now if self._ooms >= 0 else self.failed_at
            self._ooms = ooms
        rescues = report.program.oom_recovered
        if rescues > self._rescues >= 0:
            self.failed_at = self._never  # `retry_on_oom` succeeded: the errors before it did not end the program
        self._rescues = rescues
        if retries > self._retries:
            self.retried_at = now if self._retries >= 0 else self.retried_at
            self._retries = retries
        last = self._last
        if now - last.at >= MINUTE_SECONDS:
            self._last = PoolPeak(now, live, kept)
            self.minutes.append(self._last)
            del self.minutes[:-MINUTES]
        elif live > last.live or kept > last.kept:
            self._last = self.minutes[-1] = PoolPeak(last.at, max(last.live, live), max(last.kept, kept))


def kept_bytes(pool: PoolUsage) -> int:
    """Return the bytes that no flush returns: held less reclaimable, that is live and stranded.

    An arena that never returns memory is no sign of fragmentation: it keeps its memory in any case. Nor is a pool with
    unknown live bytes.
    """
    live, kept = pool.live_bytes, pool.held_bytes - pool.reclaimable.likely
    if live is None:
        return kept
    if pool.reclaimable.exactness == "not_releasable":
        return live
    return kept if kept > live else live  # each tick calls it for each pool, and `max` is slower


def split_share(peak_live: float, peak_kept: float) -> float:
    """Return 1 - peak live / peak kept over one window; 0 for a pool that keeps nothing."""
    return 1 - min(1.0, peak_live / peak_kept) if peak_kept else 0.0


class Flat(NamedTuple):
    """Period in which a value stayed within FLAT_BYTES of its first value."""

    since: float
    value: float


class Filled(NamedTuple):
    """The last growth of a nearly full device: its time and the bytes in use, 0 while the device is not nearly full."""

    at: float
    used: float


def filled(before: Filled | None, used: float, size: float, now: float) -> Filled:
    """Return the last growth after a reading of the device. The first reading is none."""
    full = used >= NEARLY_FULL * size
    if before is None:
        return Filled(-inf, used if full else 0.0)
    if not full:
        return Filled(before.at, 0.0)
    return Filled(now, used) if used >= before.used + NEARLY_FULL_RISE else before


def ramp(series: Series, used: float, size: float) -> float | None:
    """Return the seconds of the series' clock until the device is full; None if its peaks do not fill it in ten
    minutes.
    """
    if used < RAMP_FROM * size:
        return None
    times, highs = series.times(0, RAMP_BLOCKS), series.column(0, USED, MAX, RAMP_BLOCKS)
    steps = [after - before for before, after in pairwise(highs)]
    if len(highs) < RAMP_BLOCKS or not all(step > 0 for step in steps):
        return None
    if max(steps) > RAMP_LARGEST_STEP * sum(steps):
        return None
    slope = sen(times, highs)
    left = (size - max(used, highs[-1])) / slope
    return left if left < RAMP_SECONDS else None


def flat(before: Flat | None, value: float, now: float) -> Flat:
    if before is None or abs(value - before.value) > FLAT_BYTES:
        return Flat(now, value)
    return before


def orphaned(flat_period: Flat, now: float, busy: float | None, idle_seconds: float, size: float | None) -> bool:
    """Return True for constant memory without an owner; False where the utilization is unknown."""
    if busy is None or flat_period.value < max(ORPHAN_BYTES, ORPHAN_RATIO * (size or 0.0)):
        return False
    if min(idle_seconds, now - flat_period.since) > ORPHAN_SECONDS:
        return True
    return now - flat_period.since > ORPHAN_BUSY_SECONDS and flat_period.value >= ORPHAN_BUSY_RATIO * (size or inf)


class Fragmentation(NamedTuple):
    ratio: float
    live: float
    kept: float
    growth: float
    since: float


def find_fragmentation(
    recent: Iterable[PoolPeak], size: float | None, retried: bool, active: bool
) -> Fragmentation | None:
    """Return the fragmentation of a process's pools at their peaks, if it grows or the program had to retry."""
    peaks = list(recent)
    if len(peaks) < MIN_MINUTES or not size:
        return None
    window = peaks[-FRAGMENTED_MINUTES:]
    live, kept = max(peak.live for peak in window), max(peak.kept for peak in window)
    ratio = split_share(live, kept)
    if kept < FRAGMENTED_FROM * size or ratio <= (FRAGMENTED_CLEAR if active else FRAGMENTED):
        return None
    growth = kept - min(peak.kept for peak in peaks)
    if not (active or retried or growth >= GROWTH_RATIO * size):
        return None
    return Fragmentation(ratio, live, kept, growth, window[0].at)


UNHANDLED = "after an out-of-memory error that it did not handle"


def cause(ending: Ending | None, oom_at: float, now: float, filled_at: float, xid_at: float) -> str:
    """Return the reason why the end of this process is a crash; empty if it is none.

    ``ending`` is the ending that the program's agent reported. It decides, unless it is ``error`` or unknown: then
    an event shortly before the end makes a crash probable.
    """
    if ending == "exit":
        return ""
    if ending == "out-of-memory":
        return UNHANDLED
    if now - oom_at <= CRASH_SECONDS:
        return "after an allocation failed"
    if now - xid_at <= CRASH_SECONDS:
        return "after an Xid error"
    if now - filled_at <= CRASH_SECONDS:
        return "when the device had become nearly full"
    return ""


MAX_STATED_RATIO = 2.0
"""Larger ratios result from small numbers of allocations, and are not stated."""
FREED_RATIO = 0.5
"""Fragmentation ends when the pools keep less than this share of what they kept at their peak."""


class AllocationGrowth(NamedTuple):
    """Growth of the number of live allocations.

    ``ratio``: relative growth of the number as a share of that of the live bytes, None if these have not grown.
    ``rises``: whether the number rises with the bytes; None if that is not certain.
    """

    per_minute: float
    ratio: float | None
    rises: bool | None

    @property
    def evidence(self) -> list[tuple[str, float]]:
        known = (
            []
            if self.ratio is None or abs(self.ratio) > MAX_STATED_RATIO
            else [("live_allocations_growth_ratio", self.ratio)]
        )
        return [("live_allocations_per_minute", self.per_minute), *known]


class _Begin(NamedTuple):
    at: float
    number: int
    live_bytes: float


class LiveAllocations:
    """Numbers of the last block of 15 s, and of the block in which a verdict on growth began."""

    __slots__ = ("_begin", "_closed", "_open")

    def __init__(self) -> None:
        self._begin: _Begin | None = None
        self._open: tuple[int, int] | None = None
        """Smallest and largest number of the block that has not closed yet; None if they are unknown."""
        self._closed: tuple[int, int] | None = None

    def add(self, number: int | None, closes: bool) -> None:
        """Add the number of one sample. ``closes``: the sample is the first one of a new block."""
        if closes:
            self._closed, self._open = self._open, None
        if number is None:
            return
        low, high = self._open or (number, number)
        if self._open is None or number < low or number > high:
            self._open = min(low, number), max(high, number)

    def growth(self, at: float, live_bytes: float, pace: float) -> AllocationGrowth | None:
        """Return the growth since the first call after `end`; None if it is unknown, or too short.

        ``at`` and ``live_bytes``: time and smallest live bytes of the last block.
        """
        if self._closed is None:
            return None
        low, high = self._closed
        if self._begin is None:
            self._begin = _Begin(at, low, live_bytes)
        begin = self._begin
        if at - begin.at < MIN_SECONDS:
            return None
        per_minute = 60.0 * pace * (low - begin.number) / (at - begin.at)
        expected = begin.number * (live_bytes / begin.live_bytes - 1.0) if begin.live_bytes > 0 else 0.0
        if not expected > 0:
            return AllocationGrowth(per_minute, None, None)
        ratio, error = (low - begin.number) / expected, ERROR_RATIO * (high - low) / expected
        rises = None if abs(ratio - RISING_RATIO) <= error else ratio > RISING_RATIO
        return AllocationGrowth(per_minute, ratio, rises)

    def end(self) -> None:
        """Record that no verdict on growth is active."""
        self._begin = None


def idle_seconds(device: DeviceReading, process: ProcessUsage) -> float | None:
    """Return a process's idle time; where the driver does not report it by process, that of the device."""
    if process.idle_seconds is not None:
        return max(process.idle_seconds, device.idle_seconds or 0.0)
    return device.idle_seconds or None


class DeviceCase(NamedTuple):
    """A device whose ``used`` and ``size`` in bytes are known; ``active``: the verdict was active after the last tick.

    ``seconds_left``: the time until the device is full, if its recent peaks will fill it in ten minutes.
    """

    device: DeviceReading
    label: str
    used: int
    size: int
    seconds_left: float | None
    active: bool


class Found(NamedTuple):
    evidence: tuple[tuple[str, float], ...]
    summary: str
    seconds_left: float | None = None


def pressure(case: DeviceCase) -> Found | None:
    ratio, left = case.used / case.size, case.seconds_left
    if left is None and ratio <= (FULL_CLEAR if case.active else FULL):
        return None
    evidence = (("used_ratio", ratio), ("free_bytes", float(case.size - case.used)))
    end = "" if left is None else f" and will be full in {duration(left)}"
    return Found(evidence, f"{case.label} is {ratio:.1%} full{end}", left)


DEVICE_DETECTORS: Mapping[VerdictName, Callable[[DeviceCase], Found | None]] = {"pressure": pressure}
"""Verdicts on a device that follow from the values of one tick."""
