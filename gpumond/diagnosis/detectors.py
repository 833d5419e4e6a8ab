"""Detectors without a trend: pressure, orphan, idle holder, fragmentation, and the cause of a process's end. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf
from typing import NamedTuple

from gpumond.diagnosis.trend import sen_slope
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import Ending
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage
from gpumond.facts.units import GIB, MIB, MINUTE_SECONDS, duration_text
from gpumond.facts.verdicts import VerdictName
from gpumond.tick.history import MAX, USED, Series

FULL_RATIO = 0.95
FULL_CLEAR_RATIO = 0.93

RAMP_MIN_USED_RATIO = 0.80
RAMP_BLOCKS = 4
RAMP_HELD_SECONDS = 90.0
RAMP_MAX_SECONDS_LEFT = 600.0
"""Pressure also applies to a device above RAMP_MIN_USED_RATIO whose peaks will fill it within this time."""
RAMP_STARTUP_SECONDS = 300.0
"""Age of a process up to which its growth is a start and no ramp."""
RAMP_MIN_LAST_STEP_RATIO = 1 / 3
"""Minimum of the newest rise, as a share of the mean: growth must not have ended."""
RAMP_SLOWING_RATIO = 0.98
"""Ratio of successive rises below which growth slows down: the rises to come are then added up."""
RAMP_MAX_STEP_RATIO = 0.75
"""Maximum share of one step in the rise of a ramp: a program that loads its model rises once and stays there."""

ORPHAN_MIN_BYTES = GIB // 2
ORPHAN_MIN_RATIO = 0.01
"""The larger one is the minimum of orphan memory; a driver has some memory of its own."""
ORPHAN_SECONDS = 60.0
ORPHAN_BUSY_RATIO = 0.02
ORPHAN_BUSY_SECONDS = 300.0
"""Minimum and time of orphan memory while another program uses the device."""
FLAT_BYTES = 256 * MIB

IDLE_GAP_SECONDS = 120.0
"""Maximum distance of two readings of an idle device. A reading covers a second at most, so fewer of them miss work."""
IDLE_RATIO = 0.05

FRAGMENTED_MIN_SIZE_RATIO = 0.05
"""Share of the device that a pool must keep before its fragmentation is reported."""
FRAGMENTED_RATIO = 0.25
FRAGMENTED_CLEAR_RATIO = 0.20
MIN_PEAK_MINUTES = 5
STARTUP_MINUTES = 6
"""Minutes of a process in which the kept bytes grow since the program starts."""
FRAGMENTED_MIN_GROWTH_RATIO = 0.02
"""Growth of the kept bytes, as a share of the device, from which fragmentation is reported."""

NEARLY_FULL_RATIO = 0.97
MIN_RISE_BYTES = 20 * MIB
"""Growth on a nearly full device: PyTorch requests this size for allocations from 1 MiB."""
FULL_AT_END_RATIO = 0.985
"""Share of the device that was used at the end of a program that filled it and crashed."""
RISE_SECONDS, RISE_MULTIPLE, SLOW_RISE_SECONDS = 45.0, 2.0, 1800.0
"""Time since its last rise within which a process still rose: as a multiple of the time between two, and its limits."""
CRASH_SECONDS = 180.0
"""An end within this time after a failed allocation or an Xid error is a crash."""
FATAL_XIDS = frozenset((13, 31, 32, 43, 48, 61, 62, 69, 74, 79, 94, 95, 109, 119, 120, 140))
"""Xid errors that end programs. Others report a cleanup (45), remapped rows (63, 64) or a state of the device."""
CONTINUED_STEPS, CONTINUED_BYTES = 2, 64 * MIB
"""Steps or live bytes that a program adds after a failed allocation which it handled."""
LOOP_CRASHES = 3
LOOP_SECONDS = 3600.0

MIN_GROWTH_SECONDS = 60.0
"""Minimum time between the two blocks that are compared."""
RISING_RATIO = 0.02
"""Ratio above which the number rises with the bytes. Below, the new allocations are 50 times as large as the others."""
NUMBER_ERROR_RATIO = 0.1
"""Error of the smallest number, as a share of the range of the numbers in a block, which has about 15 samples."""

PEAK_MINUTES = 60
"""Number of minutes whose peaks are kept: an evaluation may reach the peak of the live bytes once an hour."""
RETRIED_SECONDS = 600.0
"""Time for which a retried allocation shows that fragmentation matters."""


class PoolPeak(NamedTuple):
    """Peak of the minute from ``at`` on. ``unreclaimable_bytes`` are those that a flush can't release."""

    at: float
    live_bytes: float
    unreclaimable_bytes: float


class Fragmentation(NamedTuple):
    ratio: float
    live_bytes: float
    unreclaimable_bytes: float
    growth_bytes: float
    since: float


class PoolPeaks:
    """Peaks of the last hour on one device, and times of the last retried and the last failed allocation.

    Fragmentation is measured at peaks and never at an instant, because a healthy pool also appears fragmented while its
    use is low.
    """

    def __init__(self, never: float) -> None:
        self._minutes = array("d")
        self.failed_at = self.retried_at = self._never = never
        self._peak = PoolPeak(never, 0, 0)
        self._begun_minutes = 0
        self.lowest_unreclaimable_bytes: float | None = None
        """Smallest unreclaimable bytes of a minute since the program has allocated its initial memory."""
        self._at_failure = (0, 0)
        """Steps and live bytes at the last failed allocation."""
        self._peak_live_bytes = self._ooms = self._retries = self._recovered_ooms = -1
        """Counters of the last report; counts from before the first report are not new."""

    def add(self, report: AgentReport, device_uuid: str, now: float) -> None:
        live = unreclaimable = ooms = retries = highest = 0
        for pool in report.pools:
            if pool.device_uuid == device_uuid and not pool.inside and pool.live_bytes is not None:
                live += pool.live_bytes
                unreclaimable += unreclaimable_bytes(pool) if pool.live_bytes else 0  # an empty pool is not fragmented
                highest += pool.peak_live_bytes or 0
                ooms += pool.ooms or 0
                retries += pool.retries or 0
        if highest > self._peak_live_bytes >= 0:
            # A reported peak that rose was reached since the last report, however short it was.
            live, unreclaimable = max(live, highest), max(unreclaimable, highest)
        self._peak_live_bytes = highest
        steps = report.program.step.steps if report.program.step is not None else 0
        if ooms > self._ooms:
            self.failed_at = now if self._ooms >= 0 else self.failed_at
            self._ooms, self._at_failure = ooms, (steps, live)
        elif steps >= self._at_failure[0] + CONTINUED_STEPS or live >= self._at_failure[1] + CONTINUED_BYTES:
            self.failed_at = self._never  # the program handled the error
        recovered = report.program.oom_recovered
        if recovered > self._recovered_ooms >= 0:
            self.failed_at = self._never  # `retry_on_oom` succeeded: the errors before it did not end the program
        self._recovered_ooms = recovered
        if retries > self._retries:
            self.retried_at = now if self._retries >= 0 else self.retried_at
            self._retries = retries
        peak = self._peak
        if now - peak.at >= MINUTE_SECONDS:
            self._begun_minutes += 1
            if self._begun_minutes > STARTUP_MINUTES and peak.unreclaimable_bytes:
                self.lowest_unreclaimable_bytes = (
                    peak.unreclaimable_bytes
                    if self.lowest_unreclaimable_bytes is None
                    else min(self.lowest_unreclaimable_bytes, peak.unreclaimable_bytes)
                )
            self._peak = PoolPeak(now, live, unreclaimable)
            self._minutes.extend(self._peak)
            del self._minutes[: -3 * PEAK_MINUTES]
        elif live > peak.live_bytes or unreclaimable > peak.unreclaimable_bytes:
            self._peak = PoolPeak(peak.at, max(peak.live_bytes, live), max(peak.unreclaimable_bytes, unreclaimable))
            self._minutes[-3:] = array("d", self._peak)

    def restart(self) -> None:
        """Discard the peaks, after the pools have freed most of their memory: it is no longer fragmented."""
        del self._minutes[:]
        self._peak, self._begun_minutes, self.lowest_unreclaimable_bytes = PoolPeak(self._never, 0, 0), 0, None

    def fragmentation(self, device_bytes: float | None, now: float, is_active: bool) -> Fragmentation | None:
        """Return the fragmentation of the pools in the last hour, if it grows or the program had to retry."""
        minutes = self._minutes
        if len(minutes) < 3 * MIN_PEAK_MINUTES or not device_bytes:
            return None
        live, unreclaimable = max(minutes[1::3]), max(minutes[2::3])
        ratio = fragmented_ratio(live, unreclaimable)
        min_ratio = FRAGMENTED_CLEAR_RATIO if is_active else FRAGMENTED_RATIO
        if unreclaimable < FRAGMENTED_MIN_SIZE_RATIO * device_bytes or ratio <= min_ratio:
            return None
        growth = 0.0 if self.lowest_unreclaimable_bytes is None else unreclaimable - self.lowest_unreclaimable_bytes
        if not (
            is_active or now - self.retried_at < RETRIED_SECONDS or growth >= FRAGMENTED_MIN_GROWTH_RATIO * device_bytes
        ):
            return None
        since = next(
            at
            for at, minute_peak in zip(minutes[::3], minutes[2::3], strict=True)
            if fragmented_ratio(live, minute_peak) > min_ratio
        )
        return Fragmentation(ratio, live, unreclaimable, growth, since)


def unreclaimable_bytes(pool: PoolUsage) -> int:
    """Return the bytes that a flush can't release: held less reclaimable, that is live and stranded.

    An arena that never returns memory isn't a sign of fragmentation: it keeps its memory in any case. Nor is a pool
    with unknown live bytes.
    """
    live, unreclaimable = pool.live_bytes, pool.held_bytes - pool.reclaimable.likely
    if live is None:
        return unreclaimable
    if pool.reclaimable.exactness == "not_releasable":
        return live
    return unreclaimable if unreclaimable > live else live  # each tick calls it for each pool, and `max` is slower


def fragmented_ratio(peak_live: float, peak_unreclaimable: float) -> float:
    """Return 1 - peak live / peak unreclaimable over one window; 0 for an empty pool."""
    return 1 - min(1.0, peak_live / peak_unreclaimable) if peak_unreclaimable else 0.0


class FlatPeriod(NamedTuple):
    """Period in which a value stayed within FLAT_BYTES of its first value."""

    since: float
    value: float


class RiseTimes:
    """Rises of a process while its device is nearly full: the time of the last one, and the time between two."""

    def __init__(self) -> None:
        self._used: float | None = None
        self._last_at, self._between_seconds = -inf, inf

    def add(self, used: float, device_used_bytes: float, device_bytes: float, now: float) -> None:
        """Add a reading of the process and of the device. The first one isn't a rise."""
        if self._used is None or used < self._used or device_used_bytes < NEARLY_FULL_RATIO * device_bytes:
            self._used = used
        elif used >= self._used + MIN_RISE_BYTES:
            self._between_seconds, self._last_at, self._used = now - self._last_at, now, used

    def are_recent(self, now: float, started: float) -> bool:
        """Return whether the process still rose: not longer ago than between its last rises.

        One rise alone counts for three minutes, in a process that starts only if it ends at once.
        """
        if self._between_seconds < inf:
            max_seconds = min(SLOW_RISE_SECONDS, RISE_MULTIPLE * self._between_seconds)
        else:
            max_seconds = CRASH_SECONDS if now - started > RAMP_STARTUP_SECONDS else 0.0
        return now - self._last_at <= max(RISE_SECONDS, max_seconds)


def seconds_until_full(series: Series, used: float, device_bytes: float) -> float | None:
    """Return the series' seconds until the device is full; None if its peaks slow down, or need over ten minutes."""
    if used < RAMP_MIN_USED_RATIO * device_bytes:
        return None
    times, highs = series.times(0, RAMP_BLOCKS), series.column(0, USED, MAX, RAMP_BLOCKS)
    steps = [after - before for before, after in pairwise(highs)]
    if len(highs) < RAMP_BLOCKS or not all(step > 0 for step in steps):
        return None
    if max(steps) > RAMP_MAX_STEP_RATIO * sum(steps) or steps[-1] < RAMP_MIN_LAST_STEP_RATIO * sum(steps) / len(steps):
        return None
    room_bytes = device_bytes - max(used, highs[-1])
    step_ratio = (steps[-1] / steps[0]) ** (1 / (len(steps) - 1))
    if step_ratio < RAMP_SLOWING_RATIO and room_bytes > steps[-1] * step_ratio / (1 - step_ratio):
        return None
    seconds_left = room_bytes / sen_slope(times, highs)
    return seconds_left if seconds_left < RAMP_MAX_SECONDS_LEFT else None


def flat_period(before: FlatPeriod | None, value: float, now: float) -> FlatPeriod:
    if before is None or abs(value - before.value) > FLAT_BYTES:
        return FlatPeriod(now, value)
    return before


def is_orphaned(
    period: FlatPeriod, now: float, utilization: float | None, idle_seconds: float, device_bytes: float | None
) -> bool:
    """Return True for constant memory without an owner; False where the utilization is unknown."""
    if utilization is None or period.value < max(ORPHAN_MIN_BYTES, ORPHAN_MIN_RATIO * (device_bytes or 0.0)):
        return False
    if min(idle_seconds, now - period.since) > ORPHAN_SECONDS:
        return True
    return now - period.since > ORPHAN_BUSY_SECONDS and period.value >= ORPHAN_BUSY_RATIO * (device_bytes or inf)


FILLED_CAUSE = "after filling it"
UNHANDLED_OOM_CAUSE = "after an unhandled out-of-memory error"


def crash_cause(ending: Ending | None, oom_at: float, now: float, has_filled_device: bool, xid_at: float) -> str:
    """Return the reason why the end of this process is a crash; empty if it is none.

    ``ending`` is the ending that the program's agent reported. It decides, unless it is ``error`` or unknown: then
    an event shortly before the end makes a crash probable.
    """
    if ending == "exit":
        return ""
    if ending == "out-of-memory":
        return UNHANDLED_OOM_CAUSE
    if now - oom_at <= CRASH_SECONDS:
        return "after an allocation failed"
    if now - xid_at <= CRASH_SECONDS:
        return "after an Xid error"
    if has_filled_device:
        return FILLED_CAUSE
    return ""


MAX_STATED_RATIO = 2.0
"""Larger ratios result from small numbers of allocations, and are not stated."""
FREED_RATIO = 0.5
"""Fragmentation ends when the pools keep less than this share of what they kept at their peak."""


class AllocationGrowth(NamedTuple):
    """Growth of the number of live allocations.

    ``ratio``: relative growth of the number as a share of that of the live bytes, None if these have not grown.
    ``number_rises``: whether the number rises with the bytes; None if that is not certain.
    """

    per_minute: float
    ratio: float | None
    number_rises: bool | None

    @property
    def evidence(self) -> list[tuple[str, float]]:
        stated_ratio = (
            []
            if self.number_rises is None or self.ratio is None or not 0.0 <= self.ratio <= MAX_STATED_RATIO
            else [("live_allocations_growth_ratio", self.ratio)]
        )
        return [("live_allocations_per_minute", self.per_minute), *stated_ratio]


class _GrowthStart(NamedTuple):
    at: float
    number: int
    live_bytes: float


class LiveAllocations:
    """Numbers of the last block of 15 s, and of the block in which a verdict on growth began."""

    def __init__(self) -> None:
        self._start: _GrowthStart | None = None
        self._open_range: tuple[int, int] | None = None
        """Smallest and largest number of the block that has not closed yet; None if they are unknown."""
        self._closed_range: tuple[int, int] | None = None

    def add(self, number: int | None, is_new_block: bool) -> None:
        """Add the number of one sample. ``is_new_block``: the sample is the first one of a block."""
        if is_new_block:
            self._closed_range, self._open_range = self._open_range, None
        if number is None:
            return
        low, high = self._open_range or (number, number)
        if self._open_range is None or number < low or number > high:
            self._open_range = min(low, number), max(high, number)

    def growth(self, at: float, live_bytes: float, speedup: float) -> AllocationGrowth | None:
        """Return the growth since the first call after `reset`; None if it is unknown, or too short.

        ``at`` and ``live_bytes``: time and smallest live bytes of the last block.
        """
        if self._closed_range is None:
            return None
        low, high = self._closed_range
        if self._start is None:
            self._start = _GrowthStart(at, low, live_bytes)
        start = self._start
        if at - start.at < MIN_GROWTH_SECONDS:
            return None
        per_minute = 60.0 * speedup * (low - start.number) / (at - start.at)
        expected = start.number * (live_bytes / start.live_bytes - 1.0) if start.live_bytes > 0 else 0.0
        if not expected > 0:
            return AllocationGrowth(per_minute, None, None)
        ratio, error = (low - start.number) / expected, NUMBER_ERROR_RATIO * (high - low) / expected
        number_rises = None if abs(ratio - RISING_RATIO) <= error else ratio > RISING_RATIO
        return AllocationGrowth(per_minute, ratio, number_rises)

    def reset(self) -> None:
        """Forget where the growth began: no verdict on growth is active."""
        self._start = None


def idle_seconds(device: DeviceReading, process: ProcessUsage) -> float | None:
    """Return a process's idle time; where the driver does not report it by process, that of the device."""
    if process.idle_seconds is not None:
        return max(process.idle_seconds, device.idle_seconds or 0.0)
    return device.idle_seconds or None


class DeviceState(NamedTuple):
    """A device whose used memory and size are known. ``usable_bytes``: its size without what the driver reserves.
    ``active``: the verdict was active after the last tick.

    ``seconds_left``: the time until the device is full, if its recent peaks will fill it in ten minutes.
    """

    device: DeviceReading
    label: str
    used_bytes: int
    size_bytes: int
    usable_bytes: int
    seconds_left: float | None
    active: bool


class Detection(NamedTuple):
    evidence: tuple[tuple[str, float], ...]
    summary: str
    seconds_left: float | None = None


def detect_pressure(state: DeviceState) -> Detection | None:
    ratio, seconds_left = state.used_bytes / state.size_bytes, state.seconds_left
    if seconds_left is None and ratio <= (FULL_CLEAR_RATIO if state.active else FULL_RATIO):
        return None
    evidence = (("used_ratio", ratio), ("free_bytes", float(max(0, state.usable_bytes - state.used_bytes))))
    end = "" if seconds_left is None else f" and will be full in {duration_text(seconds_left)}"
    return Detection(evidence, f"{state.label} is {ratio:.0%} full{end}", seconds_left)


DEVICE_DETECTORS: Mapping[VerdictName, Callable[[DeviceState], Detection | None]] = {"pressure": detect_pressure}
"""Verdicts on a device that follow from the values of one tick."""
