"""Leak test on one curve of one device or process, and the development of a leak that was found. No I/O.

Growth is a leak if it is significant (Mann-Kendall), large enough (Sen's slope), continues to the end of the window,
and is a *record*: the last blocks exceed all earlier use of this process, unlike a load that rises and falls. It must
be new, or have lasted without slowing down, unlike a warm-up or a cache that fills, which its whole curve shows.

Blocks are never shorter than a minute. *Clean* tests require little growth and an almost undisturbed line, and many
samples in a block; *rough* tests tolerate the noise of serving, and require more growth and a device that fills soon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis.growth_curve import downsample
from gpumond.diagnosis.patterns import WARM_UP_SECONDS, PlateauStep
from gpumond.diagnosis.trend import mann_kendall, sen_slope, spread
from gpumond.facts.units import HOUR_SECONDS, MIB
from gpumond.tick.history import (
    FIVE_MINUTES,
    HELD,
    LOAD,
    MAX_SAMPLES,
    MEDIAN,
    MIN,
    MINUTE,
    QUARTER_HOUR,
    TIERS,
    USED,
    UTILIZATION,
    Series,
)

LIKELY_Z = 1.64

OUTSIDE_POOLS = -1
"""The curve of a process's memory outside its pools: used less held."""

SIGNIFICANT_Z = 2.33
BUSIER_RATIO, MUCH_BUSIER_RATIO = 0.03, 0.1
"""Minimum rise of the utilization over the window, and over the whole growth, as a ratio."""
BUSIER_LOAD_RATIO = 0.1
"""Minimum rise of the engines' requests, as a share of their median."""
LOAD_POINTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakTest:
    """Criteria on the newest ``blocks`` of a tier. The last ``new_high_blocks`` of them lie above all blocks before."""

    tier: int
    blocks: int
    new_high_blocks: int
    min_growth_bytes: float
    min_growth_ratio: float
    """Minimum growth over the window in bytes, and as a ratio of the device's size."""
    full_within_seconds: float
    """Seconds within which the device would be full."""
    parts: int
    part_slope_ratio: float
    """Minimum slope in each of ``parts`` equal parts of the window, as a share of its slope; of two parts, in the
    last.
    """
    max_scatter_ratio: float
    """Maximum scatter around the line, as a share of the growth."""
    min_samples: float
    """Minimum number of samples in a block, on average."""
    min_scatter_multiple: float
    """Minimum growth, as a multiple of the scatter before the window."""
    max_rise_ratio: float = 0.4
    """Maximum size of a single rise, as a share of the growth: one large allocation isn't a leak."""


_CLEAN_TEST = LeakTest(
    tier=MINUTE,
    blocks=12,
    new_high_blocks=12,
    min_growth_bytes=256 * MIB,
    min_growth_ratio=0.0,
    full_within_seconds=inf,
    parts=3,
    part_slope_ratio=0.6,
    max_scatter_ratio=1 / 12,
    min_samples=12,
    min_scatter_multiple=4,
)
CLEAN_TESTS = (_CLEAN_TEST, replace(_CLEAN_TEST, tier=FIVE_MINUTES, blocks=7, new_high_blocks=7, min_samples=15))
_ROUGH_TEST = LeakTest(
    tier=QUARTER_HOUR,
    blocks=8,
    new_high_blocks=4,
    min_growth_bytes=512 * MIB,
    min_growth_ratio=0.03,
    full_within_seconds=48 * HOUR_SECONDS,
    parts=2,
    part_slope_ratio=0.3,
    max_scatter_ratio=0.5,
    min_samples=3,
    min_scatter_multiple=2,
)
ROUGH_TESTS = (
    replace(
        _ROUGH_TEST,
        tier=FIVE_MINUTES,
        new_high_blocks=5,
        min_growth_ratio=0.005,
        full_within_seconds=6 * HOUR_SECONDS,
        min_scatter_multiple=6,
        max_rise_ratio=1 / 3,
    ),
    _ROUGH_TEST,
)
MIN_RISES = 3
"""Minimum number of rises within the window; fewer are steps and no trend."""
RISE_RATIO = 0.05
"""Minimum size of a rise, as a share of the growth."""
LAST_RISE_RATIO = 0.5
"""Minimum rise to the last block of a clean window, as a share of the slope: growth must not have ended."""
SCATTER_BLOCKS = 24
"""Number of blocks before the window from which the scatter is measured."""
MAX_SPAN_RATIO = 2.0
"""Maximum span of a window, as a multiple of its blocks: a longer one has too many gaps."""

RETURNED_RATIO = 0.3
"""A leak has ended when all but this share of its growth is released."""
STOPPED_RATIO = 0.15
"""A leak has ended when its slope is below this share of its first slope, for the time below."""
STOPPED_SECONDS = 2700.0
STOPPED_AGE_RATIO = 0.5
LONGEST_STOPPED_SECONDS = 43200.0
"""Time for which a leak that has stopped was so slow: the minimum, a share of its age, and the maximum. It may pause
at night.
"""
UNKNOWN_BLOCKS = 5
LATE_PAUSES = 3.0
"""Stairs have ended when the next step is late by this number of pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Growth that does not end by itself. Times and slope are those of the History's clock."""

    signal: int
    statistic: int = MEDIAN
    tier: int
    blocks: int
    onset: float
    base_bytes: float
    top_bytes: float
    slope: float
    first_slope: float
    significance: float = 0.0
    window_seconds: float
    """Length of the evaluated window in seconds."""
    pause_seconds: float = 0.0
    """Longest time between two steps of a leak that was found by its stairs alone, in seconds; else 0."""
    by_quartiles: bool = False
    """True if the serving test found it, which follows the upper quartiles of the blocks."""

    @property
    def growth_bytes(self) -> float:
        return self.top_bytes - self.base_bytes

    def continued(self, times: Sequence[float], values: Sequence[float], slope: float) -> Leak | None:
        """Return the leak's state after these blocks; None if most of its growth was returned, or has stopped."""
        top_bytes = max(self.top_bytes, values[-1])
        if max(values[-2:]) < self.base_bytes + RETURNED_RATIO * (top_bytes - self.base_bytes) or has_stopped(
            self, times, values
        ):
            return None
        return replace(self, top_bytes=top_bytes, slope=slope if slope > 0 else self.slope)


class TierCurve(NamedTuple):
    times: Sequence[float]
    values: Sequence[float]
    counts: Sequence[float]
    past_peak: float
    """The highest value before the first one."""


def curve_of(series: Series, tier: int, signal: int, statistic: int = MEDIAN, count: int = MAX_SAMPLES) -> TierCurve:
    """Return the blocks of one tier in which the signal is known."""
    times, counts = series.times(tier, count), series.counts(tier, count)
    values: Sequence[float]
    if signal == OUTSIDE_POOLS:
        used, held = (series.column(tier, each, statistic, count) for each in (USED, HELD))
        values, past_peak = [one - other for one, other in zip(used, held, strict=True)], -inf
    else:
        values, past_peak = series.column(tier, signal, statistic, count), series.past_peaks[tier][signal]
    if sum(values) != sum(values):  # one is NaN; this is faster than a comparison of each
        indices = [i for i, value in enumerate(values) if value == value]
        times, values, counts = (type(times)("d", [row[i] for i in indices]) for row in (times, values, counts))
    return TierCurve(times, values, counts, past_peak)


class CandidateCurve(NamedTuple):
    """The curve to be tested: one signal of one device or process that begins at ``started``.

    ``device_bytes``: the device's size. ``room_bytes``: the bytes until it is full. ``speedup``: seconds of the series
    in one real second.
    """

    series: Series
    device: Series
    signal: int
    started: float
    device_bytes: float | None
    room_bytes: float | None
    speedup: float


def find_curve_leak(candidate: CandidateCurve, closed_tiers: int) -> Leak | None:
    """Return the leak in the tiers of which a block has just closed, if any."""
    for test in (*CLEAN_TESTS, *ROUGH_TESTS):
        if test.tier < closed_tiers:
            leak = _leak_in_test(candidate, test, MEDIAN)
            if leak is None and test in CLEAN_TESTS:
                leak = _leak_in_test(candidate, test, MIN)
            if leak is not None and not is_load_rising(candidate.device, test.tier, test.blocks):
                return leak
    return None


def from_stairs(steps: Sequence[PlateauStep], signal: int) -> Leak:
    """Return the leak that consists of these steps."""
    pause = max(after.at - before.at for before, after in pairwise(steps))
    span = steps[-1].at - steps[0].at
    base_bytes, top_bytes = steps[0].before, steps[-1].after
    # The first step begins the first pause, so its height belongs to the time before.
    slope = (top_bytes - steps[0].after) / span
    return Leak(
        signal=signal,
        tier=MINUTE,
        blocks=0,
        onset=steps[0].at,
        base_bytes=base_bytes,
        top_bytes=top_bytes,
        slope=slope,
        first_slope=slope,
        window_seconds=span,
        pause_seconds=pause,
    )


def from_floors(floors: Sequence[tuple[float, float]], signal: int) -> Leak | None:
    """Return the leak that these floors are, each a time and a level; None without floors."""
    if not floors:
        return None
    (begin, base_bytes), (end, top_bytes) = floors[0], floors[-1]
    slope = (top_bytes - base_bytes) / (end - begin)
    return Leak(
        signal=signal,
        tier=QUARTER_HOUR,
        blocks=round((end - begin) / TIERS[QUARTER_HOUR].seconds),
        onset=begin,
        base_bytes=base_bytes,
        top_bytes=top_bytes,
        slope=slope,
        first_slope=slope,
        window_seconds=end - begin,
    )


def updated_stairs(leak: Leak, steps: Sequence[PlateauStep], now: float) -> Leak | None:
    """Return the leak's present state; None when it fell, or has made no step for long."""
    if len(steps) < 2 or now - steps[-1].at > LATE_PAUSES * leak.pause_seconds:
        return None
    slope = (steps[-1].after - steps[0].after) / (steps[-1].at - steps[0].at)
    return replace(leak, top_bytes=steps[-1].after, slope=slope)


def updated_curve_leak(leak: Leak, series: Series, closed_tiers: int) -> Leak | None:
    """Return the leak's present state; None when it has ended, or its signal is unknown."""
    if leak.tier >= closed_tiers:
        return leak
    seconds = TIERS[leak.tier].seconds
    times, values, _, _ = curve_of(series, leak.tier, leak.signal, leak.statistic)
    if len(values) < 2 or series.times(leak.tier, 1)[-1] - times[-1] > UNKNOWN_BLOCKS * seconds:
        return None
    begin = max(min(bisect_left(times, leak.onset), len(times) - leak.blocks), len(times) - 2 * leak.blocks, 0)
    return leak.continued(times, values, sen_slope(times[begin:], values[begin:]))


def has_stopped(leak: Leak, times: Sequence[float], values: Sequence[float]) -> bool:
    """Return whether a leak has hardly grown for half of its age. A program that ends is a fall in one half of this
    time; the leak continues in the other.
    """
    age = times[-1] - leak.onset
    recent_seconds = max(STOPPED_SECONDS, min(LONGEST_STOPPED_SECONDS, STOPPED_AGE_RATIO * age))
    if age <= STOPPED_SECONDS:
        return False
    limits = [bisect_left(times, times[-1] - recent_seconds * share) for share in (1.0, 0.5, 0.0)]
    halves = [(values[end] - values[begin]) / max(1.0, times[end] - times[begin]) for begin, end in pairwise(limits)]
    return max(halves) < STOPPED_RATIO * leak.first_slope


def _leak_in_test(candidate: CandidateCurve, test: LeakTest, statistic: int) -> Leak | None:
    newest = curve_of(
        candidate.series, test.tier, candidate.signal, statistic, round(MAX_SPAN_RATIO * test.blocks)
    ).values
    if not newest or max(newest) - min(newest) < test.min_growth_bytes / 2:
        return None  # as most do: the tests below take longer
    times, values, counts, past_peak = _curve_since(
        curve_of(candidate.series, test.tier, candidate.signal, statistic), candidate.started
    )
    count, new_high_blocks = test.blocks, test.new_high_blocks
    seconds = TIERS[test.tier].seconds
    begin = bisect_left(times, candidate.started + max(WARM_UP_SECONDS, 2 * seconds))
    if len(values) - begin < count:
        return None
    low = min(values[-new_high_blocks:])
    if low <= past_peak or low <= max(values[:-new_high_blocks], default=-inf):
        return None
    window, window_times = values[-count:], times[-count:]
    if (
        window_times[-1] - window_times[0] > MAX_SPAN_RATIO * count * seconds
        or sum(counts[-count:]) < test.min_samples * count / candidate.speedup
    ):
        return None
    significance = mann_kendall(window)
    if significance <= SIGNIFICANT_Z:
        return None
    slope = sen_slope(window_times, window)
    growth_bytes = slope * (window_times[-1] - window_times[0])
    if growth_bytes < max(test.min_growth_bytes, test.min_growth_ratio * (candidate.device_bytes or 0.0)):
        return None
    if spread(window_times, window, slope) > test.max_scatter_ratio * growth_bytes:
        return None
    if not _in_many_steps(window, growth_bytes, test.max_rise_ratio):
        return None
    if candidate.room_bytes is not None and candidate.room_bytes > slope * test.full_within_seconds:
        return None
    if not _growth_lasts(window_times, window, slope, test):
        return None
    past = slice(max(begin, len(values) - count - SCATTER_BLOCKS), len(values) - count)
    if growth_bytes < test.min_scatter_multiple * _scatter(times[past], values[past]):
        return None
    before = values[begin:-count][-count:]
    base_bytes = median(before) if len(before) else window[0]
    base_bytes = min(base_bytes, window[0])
    onset = max(times[begin], window_times[-1] - (window[-1] - base_bytes) / slope)
    span = window_times[-1] - window_times[0] + seconds
    return Leak(
        signal=candidate.signal,
        statistic=statistic,
        tier=test.tier,
        blocks=count,
        onset=onset,
        base_bytes=base_bytes,
        top_bytes=window[-1],
        slope=slope,
        first_slope=slope,
        significance=significance,
        window_seconds=span,
    )


def _curve_since(curve: TierCurve, started: float) -> TierCurve:
    """Return the curve without the time before ``started``, if that is not the beginning of the series."""
    begin = bisect_left(curve.times, started)
    if begin == 0:
        return curve
    return TierCurve(curve.times[begin:], curve.values[begin:], curve.counts[begin:], -inf)


def _in_many_steps(window: Sequence[float], growth_bytes: float, max_rise_ratio: float) -> bool:
    changes = [after - before for before, after in pairwise(window)]
    rises = sum(1 for change in changes if change > RISE_RATIO * growth_bytes)
    return rises >= MIN_RISES and max(changes) <= max_rise_ratio * (window[-1] - window[0])


def is_load_rising(device: Series, tier: int, blocks: int) -> bool:
    """Return True if the device's utilization or its engines' requests rise: growth with the load is not yet a leak."""
    return any(
        _load_series_rises(device.column(tier, signal, MEDIAN, blocks), blocks, rise, LIKELY_Z)
        for signal, rise in ((UTILIZATION, BUSIER_RATIO), (LOAD, None))
    )


def has_risen_with_load(device: Series, age: float) -> bool:
    """Return True if the utilization or the engines' requests have risen since growth of this age began."""
    tier = next(
        (tier for tier in (MINUTE, FIVE_MINUTES) if age <= TIERS[tier].seconds * TIERS[tier].rows), QUARTER_HOUR
    )
    blocks = round(age / TIERS[tier].seconds)
    return any(
        _load_series_rises(
            downsample(range(blocks), device.column(tier, signal, MEDIAN, blocks), LOAD_POINTS)[1],
            8,
            rise,
            SIGNIFICANT_Z,
        )
        for signal, rise in ((UTILIZATION, MUCH_BUSIER_RATIO), (LOAD, None))
    )


def _load_series_rises(load: Sequence[float], count: int, min_rise: float | None, min_z: float) -> bool:
    """Return True if the load rises significantly, by ``min_rise`` or a tenth of its level, in so many known blocks."""
    if len(load) < count or any(value != value for value in load):
        return False
    rise = sen_slope(range(len(load)), load) * len(load)
    return (
        rise > 0
        and rise >= (BUSIER_LOAD_RATIO * median(load) if min_rise is None else min_rise)
        and (mann_kendall(load) > min_z)
    )


def _scatter(times: Sequence[float], values: Sequence[float]) -> float:
    return spread(times, values, sen_slope(times, values)) if len(values) else 0.0


def _growth_lasts(times: Sequence[float], window: Sequence[float], slope: float, test: LeakTest) -> bool:
    if test in CLEAN_TESTS and window[-1] - window[-2] < LAST_RISE_RATIO * slope * (times[-1] - times[-2]):
        return False
    length = -(-len(window) // test.parts)
    latest = len(window) - length
    starts = [latest] if test.parts == 2 else [round(latest * part / (test.parts - 1)) for part in range(test.parts)]
    return all(
        sen_slope(times[start : start + length], window[start : start + length]) >= test.part_slope_ratio * slope
        for start in starts
    )


MIN_MINUTES = 8
"""Minimum number of busy minutes, and of idle ones."""
BUSY_RATIO = 0.05
IDLE_GROWTH_RATIO = 0.2
"""Maximum growth in idle minutes, as a share of the growth in busy ones."""
STAIRS_GROWTH_RATIO = 0.7
STAIRS_MINUTES_RATIO = 0.34
"""Minimum share of the growth that happens in this share of the minutes."""


def form_of(leak: Leak, series: Series, device: Series) -> str:
    """Return the form of a leak; ``linear`` unless another one is evident."""
    minutes = curve_of(series, MINUTE, leak.signal, leak.statistic)
    begin = max(0, bisect_left(minutes.times, leak.onset) - 1)
    times, values = minutes.times[begin:], minutes.values[begin:]
    if len(values) < MIN_MINUTES:
        return "linear"
    utilization = device.times(MINUTE), device.column(MINUTE, UTILIZATION)
    idle: list[float] = []
    busy: list[float] = []
    for (_, before), (at, after) in pairwise(zip(times, values, strict=True)):
        ratio = _nearest_utilization(*utilization, at)
        if ratio is not None:
            (idle if ratio < BUSY_RATIO else busy).append(after - before)
    if min(len(idle), len(busy)) >= MIN_MINUTES:
        busy_growth = sum(busy) / len(busy)
        if busy_growth > 0 and sum(idle) / len(idle) <= IDLE_GROWTH_RATIO * busy_growth:
            return "load-proportional"
    return "stairs" if _in_stairs([after - before for before, after in pairwise(values)]) else "linear"


def _in_stairs(changes: list[float]) -> bool:
    """Return True if most of the growth happens in few minutes and little in the others."""
    rises = sorted(changes, reverse=True)
    few = rises[: max(1, int(STAIRS_MINUTES_RATIO * len(rises)))]
    up, down = sum(rise for rise in rises if rise > 0), -sum(rise for rise in rises if rise < 0)
    return (
        up > 2 * down
        and sum(few) >= STAIRS_GROWTH_RATIO * up
        and rises[len(rises) // 2] < IDLE_GROWTH_RATIO * sum(few) / len(few)
    )


def _nearest_utilization(times: Sequence[float], utilization: Sequence[float], at: float) -> float | None:
    """Return the utilization at the nearest time, since series close their minutes at different times."""
    after = bisect_left(times, at)
    nearest = min((after - 1, after), key=lambda i: abs(times[i] - at) if 0 <= i < len(times) else inf)
    if not 0 <= nearest < len(times) or abs(times[nearest] - at) > 60 or not isfinite(utilization[nearest]):
        return None
    return utilization[nearest]
