"""Leak test for curves that load moves by more than the leak does: the serving test. No I/O.

Between idle and busy, a serving program moves by gigabytes within minutes, and one excursion of minutes can lie above
all that a slow leak reaches for hours. The test therefore compares like with like: the median of the last 40 minutes
with the median of every earlier 40 minutes, and the slopes of all pairs of blocks with each other. It uses the *upper
quartile* of the minute medians in each block of five minutes: a serving curve has a ceiling and dips below it, so the
upper quartile is quieter than the median. A curve that *creeps* between its jumps shows a leak sooner: load comes back
to the levels of before, a leak adds its rate to all of them. docs/contributing/leak-tests.md has the
results on recorded curves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis.leak_criteria import UNKNOWN_BLOCKS, CandidateCurve, Leak, curve_of as curve_of, is_load_rising
from gpumond.diagnosis.trend import deviation, mann_kendall, quantile, sen_slope, slopes
from gpumond.facts.units import HOUR_SECONDS, MIB
from gpumond.tick.history import FIVE_MINUTES, MINUTE, QUARTER_HOUR, TIERS, HistoryRows, Series, highest

MAX_BLOCKS = 288
"""Number of blocks that are kept: 24 hours, so the load of a whole day is known."""
QUARTILE = 0.75
"""Quantile of the minute medians of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTest:
    """Criteria of the serving test. A block is five minutes."""

    blocks: int = 16
    """Number of blocks in the window."""
    new_high_blocks: int = 8
    """Number of last blocks whose median is compared with the past: no shorter excursion counts. A leak is found if
    it exceeds the margin in this time.
    """
    skipped_blocks: int = 2
    """Number of blocks at the start of a process that the window excludes: the program allocates its initial memory."""
    min_samples: float = 3
    """Minimum number of samples in a block, on average: fewer have no quartile."""
    max_span_ratio: float = 1.2
    """Maximum span of the window, as a multiple of its blocks: steps within a longer gap would look like a line."""
    consistent_quantile: float = 0.25
    consistent_ratio: float = 0.15
    """Minimum of this quantile of the slopes of all pairs of blocks, as a share of their median. After a jump, a
    quarter of the pairs does not rise. It also makes the trend significant: of 16 blocks with a quarter of falling
    pairs the Mann-Kendall statistic is 2.7. Smaller shares increase false alerts, larger ones the delay.
    """
    min_creeps: float = 5
    """Minimum number of minutes with the same rise between the jumps of the load. Such a curve needs no record, and may
    have steps.
    """
    full_within_seconds: float = 48 * HOUR_SECONDS
    """Seconds within which the device would be full: load that changes over days resembles slower growth."""
    margin_bytes: float = 512 * MIB
    margin_ratio: float = 0.005
    """Minimum growth over the window, and minimum distance of the last blocks from the past, in bytes and as a ratio of
    the device's size: a level that load reaches again differs by less.
    """
    growth_ratio: float = 0.0
    """Minimum growth over the window as a ratio of the device's size, if it is more than the margin."""
    past_quantile: float = 0.9
    """Quantile of the past blocks that the last ones exceed: a tenth of the past may be excursions."""
    max_two_steps_ratio: float = 2.0
    """Maximum deviation from the line, as a multiple of that from the best two steps: a model load is a step. Two steps
    follow load as well, and describe a leak better than a line does.
    """
    steps: int = 3
    between_steps_ratio: float = 0.21
    """Minimum slope between the ``steps`` steps that describe the window best, as a share of its slope: a cache that
    grows in large blocks rises in a few steps, and varies between them.
    """
    whole_device_multiple: float = 2.0
    """Factor of this ratio for the curve of a whole device, which also has the steps of programs that start and end."""


SERVING_TESTS = (
    ServingTest(blocks=10, new_high_blocks=5, margin_ratio=0.02, steps=2, between_steps_ratio=0.28),
    ServingTest(blocks=12, new_high_blocks=6, margin_bytes=256 * MIB, growth_ratio=0.04),
    ServingTest(),
    ServingTest(blocks=24, new_high_blocks=12, margin_bytes=256 * MIB),
)
"""The windows: in 50 minutes a fast leak is found before it has filled the device, in two hours a slow one exceeds the
margin.
"""


OTHERS_MULTIPLE = 2
"""Minimum number of minutes with the same rise, as a multiple of the number of those that rest or fall as much."""
ALIKE_RATIO = 0.25
"""Maximum difference of a rise from another, as a share of it."""
CREEP_SLOPE_LIMITS = (0.4, 2.5)
"""Limits of this rise, as shares of the slope of the window."""
NEAR_RISE_LIMITS, MIN_LAST_RISE_RATIO = (0.25, 2.5), 0.75
"""Minimum median of the last half of the small rises, as a share of that of the first half, and limits of these as
shares of the rise that is alike: a cache that fills creeps ever more slowly.
"""
MAX_CHANGE_SECONDS = 100.0
"""Maximum seconds between two minutes that are compared: a longer time has a gap."""


class _Steps(NamedTuple):
    """Deviation of a window from its best steps, and the limits of the parts between them."""

    deviation: float
    limits: tuple[int, ...]


class UpperQuartiles:
    """Upper quartile of the minute medians in each of the last 288 blocks of five minutes of one signal.

    Memory: 288 rows of 16 bytes.
    """

    def __init__(self) -> None:
        self.rows = HistoryRows(2, MAX_BLOCKS)
        self._signal: int | None = None

    def add(self, series: Series, signal: int) -> None:
        """Add the newest block of the series. Another signal than before discards the earlier blocks."""
        begin = series.times(FIVE_MINUTES, 1)[-1]
        end = begin + TIERS[FIVE_MINUTES].seconds
        recent = zip(series.times(MINUTE, 6), series.column(MINUTE, signal, count=6), strict=True)
        medians = [value for at, value in recent if begin <= at < end and value == value]
        if signal != self._signal:
            self.rows, self._signal = HistoryRows(2, MAX_BLOCKS), signal
        newest = self.rows.times(1)
        if medians and (not newest or begin > newest[0]):
            self.rows.append((begin, quantile(sorted(medians), QUARTILE), series.counts(FIVE_MINUTES, 1)[-1]))

    @property
    def times(self) -> Sequence[float]:
        return self.rows.times(MAX_BLOCKS)

    @property
    def values(self) -> Sequence[float]:
        return self.rows.column(0, MAX_BLOCKS)

    @property
    def counts(self) -> Sequence[float]:
        return self.rows.column(1, MAX_BLOCKS)


def find_serving_leak(
    candidate: CandidateCurve, curve: UpperQuartiles, tests: Sequence[ServingTest] = SERVING_TESTS
) -> Leak | None:
    """Return the leak that the newest block completes, if any."""
    return next((leak for test in tests if (leak := _leak_in_test(candidate, curve, test)) is not None), None)


def updated_serving_leak(leak: Leak, curve: UpperQuartiles, series: Series) -> Leak | None:
    """Return the leak's present state; None when its growth was returned or has stopped, or its signal is unknown."""
    times, values, count = curve.times, curve.values, leak.blocks
    newest, seconds = series.times(FIVE_MINUTES, 1)[-1], TIERS[FIVE_MINUTES].seconds
    if len(values) < count or newest - times[-1] > UNKNOWN_BLOCKS * seconds:
        return None
    return leak.continued(times, values, sen_slope(times[-count:], values[-count:]))


def _leak_in_test(candidate: CandidateCurve, curve: UpperQuartiles, test: ServingTest) -> Leak | None:
    times, values = curve.times, curve.values
    count, new_high_blocks = test.blocks, test.new_high_blocks
    if len(values) < test.skipped_blocks + count + 1:
        return None
    window_times, window = times[-count:], values[-count:]
    seconds, span = TIERS[FIVE_MINUTES].seconds, window_times[-1] - window_times[0]
    if (
        span > test.max_span_ratio * count * seconds
        or sum(curve.counts[-count:]) < test.min_samples * count / candidate.speedup
    ):
        return None
    late_median = median(window[-new_high_blocks:])
    if late_median <= window[0]:
        return None
    pairs = sorted(slopes(window_times, window))
    slope = median(pairs)
    growth_bytes = slope * (count - 1) * seconds
    margin = max(test.margin_bytes, test.margin_ratio * (candidate.device_bytes or 0.0))
    if growth_bytes <= max(0.0, margin, test.growth_ratio * (candidate.device_bytes or 0.0)):
        return None
    if sen_slope(window_times[-new_high_blocks:], window[-new_high_blocks:]) <= 0:
        return None
    if candidate.room_bytes is not None and candidate.room_bytes > slope * test.full_within_seconds:
        return None
    if not _is_creeping(candidate, test, slope):
        if quantile(pairs, test.consistent_quantile) < test.consistent_ratio * slope:
            return None
        if len(values) < test.skipped_blocks + count + new_high_blocks or late_median <= _peak_before(
            candidate, times[0]
        ):
            return None
        if not _exceeds_past(late_median - margin, values[:-new_high_blocks], test):
            return None
        if not _is_line(candidate, window_times, window, slope, test):
            return None
    if is_load_rising(candidate.device, FIVE_MINUTES, count):
        return None
    base_bytes = min(median(values[test.skipped_blocks : -count][-count:]), window[0])
    onset = max(times[test.skipped_blocks], window_times[-1] - (window[-1] - base_bytes) / slope)
    return Leak(
        signal=candidate.signal,
        tier=FIVE_MINUTES,
        blocks=count,
        onset=onset,
        base_bytes=base_bytes,
        top_bytes=window[-1],
        slope=slope,
        first_slope=slope,
        significance=mann_kendall(window),
        window_seconds=span + seconds,
        by_quartiles=True,
    )


def _is_creeping(candidate: CandidateCurve, test: ServingTest, slope: float) -> bool:
    """Return True if the curve creeps: between the jumps of the load, most small changes from minute to minute are the
    same rise and do not become smaller, few are rests or falls, and few fell as much before. The window has about the
    same slope.
    """
    minutes = curve_of(candidate.series, MINUTE, candidate.signal)
    changes = [
        (value - before) / (at - since)
        for (since, before), (at, value) in pairwise(zip(minutes.times, minutes.values, strict=True))
        if since >= candidate.started and at - since < MAX_CHANGE_SECONDS
    ]
    recent = changes[-test.blocks * TIERS[FIVE_MINUTES].seconds // TIERS[MINUTE].seconds :]
    window = sorted(recent)
    falls = sorted(-change for change in changes)
    low, high = 1 - ALIKE_RATIO, 1 + ALIKE_RATIO
    for rise in window[
        bisect_left(window, CREEP_SLOPE_LIMITS[0] * slope) : bisect_right(window, CREEP_SLOPE_LIMITS[1] * slope)
    ]:
        others = _count_between(window, -1.5 * rise, 0.5 * rise), _count_between(falls, low * rise, high * rise)
        if _count_between(window, low * rise, high * rise) >= max(test.min_creeps, OTHERS_MULTIPLE * max(others)):
            near = [change for change in recent if NEAR_RISE_LIMITS[0] * rise <= change <= NEAR_RISE_LIMITS[1] * rise]
            half = len(near) // 2
            return median(near[half:]) >= MIN_LAST_RISE_RATIO * median(near[:half])
    return False


def _count_between(ordered: Sequence[float], low: float, high: float) -> int:
    return bisect_right(ordered, high) - bisect_left(ordered, low)


def _peak_before(candidate: CandidateCurve, since: float) -> float:
    """Return the highest median of a quarter of an hour before ``since``, from where on the blocks are kept."""
    if candidate.series.started < candidate.started:
        return -inf
    quarters = zip(
        candidate.series.times(QUARTER_HOUR), candidate.series.column(QUARTER_HOUR, candidate.signal), strict=True
    )
    before = highest(value for at, value in quarters if at + TIERS[QUARTER_HOUR].seconds <= since)
    return max(before, candidate.series.past_peaks[QUARTER_HOUR][candidate.signal])


def _exceeds_past(level: float, past: Sequence[float], test: ServingTest) -> bool:
    """Return True if the level is above most of the past, and the median of every part as long as the last blocks."""
    if level <= quantile(sorted(past), test.past_quantile):
        return False
    length = test.new_high_blocks
    return all(median(past[end - length : end]) < level for end in range(len(past), length - 1, -1))


def _is_line(
    candidate: CandidateCurve, times: Sequence[float], window: Sequence[float], slope: float, test: ServingTest
) -> bool:
    """Return True if a line describes the window hardly worse than two steps, and the curve rises between more."""
    line = deviation([value - slope * time for time, value in zip(times, window, strict=True)])
    best = _best_steps(window, max(2, test.steps))
    if line > test.max_two_steps_ratio * best[2].deviation:
        return False
    between = [
        rise for begin, end in pairwise(best[test.steps].limits) for rise in slopes(times[begin:end], window[begin:end])
    ]
    ratio = test.between_steps_ratio * (test.whole_device_multiple if candidate.series is candidate.device else 1.0)
    return median(between) >= ratio * slope


def _best_steps(window: Sequence[float], max_steps: int) -> list[_Steps]:
    """Return, by the number of steps, those that describe the window best: with the smallest sum of distances from the
    medians of the parts between them, of at least two blocks each.
    """
    count = len(window)
    parts = {
        (begin, end): deviation(window[begin:end]) for begin in range(count) for end in range(begin + 2, count + 1)
    }
    steps_by_end = {end: _Steps(parts[0, end], (0, end)) for end in range(2, count + 1)}
    best = [steps_by_end[count]]
    for number in range(1, max_steps + 1):
        steps_by_end = {
            end: min(
                _Steps(steps_by_end[begin].deviation + parts[begin, end], (*steps_by_end[begin].limits, end))
                for begin in range(2 * number, end - 1)
            )
            for end in range(2 * number + 2, count + 1)
        }
        best.append(steps_by_end[count])
    return best
