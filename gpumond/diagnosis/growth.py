"""Growth within minutes: the suspected verdict ``growing``, and leaks that are evident within six minutes. No I/O.

Both use blocks of 15 s: the live bytes at the ends of steps, without the memory that a step allocates and frees; if the
program does not call ``step()``, medians or minimums. ``growing`` is a straight rise of two minutes above all that the
process used before; a start, a data set that is cached and an evaluation rise like that as well. A *quick* leak is an
almost exact line of six minutes that does not slow down, after a flat curve, in a program with an agent.
docs/contributing/leak-tests.md lists the constants and the results.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import inf, nan
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis.leak_criteria import CandidateCurve, Leak, curve_of, is_load_rising
from gpumond.diagnosis.trend import least_squares, mann_kendall, sen_slope, spread
from gpumond.facts.program import StepUsage
from gpumond.facts.units import MIB
from gpumond.tick.history import MEDIAN, MIN, MINUTE, TIERS, highest

BLOCK_TIER = 0
"""Index of the tier of 15 s."""
BLOCK_SECONDS = float(TIERS[BLOCK_TIER].seconds)
KEPT_BLOCKS = 26
"""Number of blocks of which the steps are known: those of the longest window, and two."""
STATISTICS = (MEDIAN, MIN)
MIN_SAMPLES = 10
"""Minimum number of samples in a block, on average."""
MAX_SPAN_RATIO = 1.5
"""Maximum span of a window, as a multiple of its blocks: a longer one has gaps."""
FOLLOWED_MINUTES = 12
"""Number of minutes over which a leak that was found here is followed, as a clean one."""

GROWING_BLOCKS = 7
"""Number of blocks of ``growing``: with the block in which the growth begins, two minutes."""
GROWING_BYTES = 48 * MIB
"""Minimum growth in these two minutes."""
GROWING_SCATTER_MULTIPLE = 6.0
"""Minimum growth, as a multiple of the scatter around the line."""
GROWING_Z = 2.6
"""Minimum of the Mann-Kendall statistic: of 7 blocks at most one pair falls."""
HALF_SLOPE_LIMITS = (0.85, 1.8)
"""Limits of the slope in the second half, as a share of that in the first: growth that slows down is a warm-up."""
MAX_FALL_RATIO, MAX_RISE_RATIO = 0.10, 0.45
"""Maximum fall and maximum rise from block to block, as shares of the growth."""
ENDED_BLOCKS = 16
ENDED_RATIO = 0.3
"""``growing`` ends when the slope in the last four minutes is below this share of its first slope."""

QUICK_BLOCKS = 24
QUICK_MIN_AGE_SECONDS = 240.0
"""Minimum time between the start of the process and the window."""
QUICK_BYTES = 512 * MIB
"""Minimum growth over the window: a slower leak is found by the clean tests."""
QUICK_SCATTER_RATIO = 1 / 24
"""Maximum scatter around the line, as a share of the growth."""
QUICK_PARTS = 6
PART_SLOPE_LIMITS = (0.6, 1.6)
"""Limits of the slope in each sixth of the window, as shares of its slope: caches and a curriculum rise in steps."""
MAX_JUMP_RATIO = 0.15
"""Maximum rise from block to block, as a share of the growth: one allocation would hide that it slows down."""
MIN_LAST_MEDIAN_SLOPE_RATIO = 0.7
"""Minimum median slope in the last third, as a share of that in the first: the median ignores single allocations."""
MIN_LAST_SLOPE_RATIO = 0.85
"""Minimum slope in the last third, as a share of that in the first: growth that slows down is a cache."""
STEEP_BYTES_PER_SECOND = 400 * MIB / 60
"""Maximum slope in a program that counts no steps: an evaluation or a generation is as straight."""
MIN_STEPPING_RATIO = 0.5
"""Minimum share of the blocks with a new step, if the program counts steps: an evaluation does none."""
FLAT_BLOCKS = (12, 20)
"""Minimum and maximum number of blocks before the window that are flat: 3 to 5 minutes."""
FLAT_SLOPE_RATIO, FLAT_SCATTER_RATIO = 0.15, 0.1
"""Maximum slope and scatter of these blocks, as shares of the window's slope and growth."""


class StepCounts:
    """Steps of a program in its last blocks of 15 s; unknown without an agent's count."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.are_measured = False
        """True if the live bytes at the end of a step are known."""
        self._measured_at = -inf
        self._blocks: list[tuple[float, int]] = []  # an empty deque has 700 bytes, and few processes have an agent

    def add(self, step: StepUsage | None, uses_one_device: bool, now: float, seconds: float) -> float:
        """Add what the agent reports, or None. Return the live bytes if a step has ended, else NaN.

        The live bytes of a program on several devices are unknown on each. ``seconds``: the time for which
        one step end counts.
        """
        level, steps_done = nan, None
        if step is not None:
            steps_done = step.steps
            if step.live_bytes is not None and uses_one_device and steps_done != self.count:
                level, self._measured_at = float(step.live_bytes), now
        self.count = steps_done
        self.are_measured = now - self._measured_at < seconds
        return level

    def close(self, at: float) -> None:
        """Keep the number of steps at the end of the block that begins at ``at``."""
        if self.count is None:
            self._blocks.clear()
        elif not self._blocks or at > self._blocks[-1][0]:
            self._blocks.append((at, self.count))
            del self._blocks[:-KEPT_BLOCKS]

    def counts_at(self, times: Sequence[float]) -> list[int] | None:
        """Return the number of steps at the end of each block; None if one is unknown."""
        counts = dict(self._blocks)
        return [counts[at] for at in times] if all(at in counts for at in times) else None


class Growth(NamedTuple):
    """A straight rise that goes on. Times and slopes are those of the History's clock. ``statistic``: MEDIAN or MIN."""

    statistic: int
    onset: float
    base_bytes: float
    top_bytes: float
    first_slope: float
    slope: float
    bytes_per_step: float | None

    @property
    def growth_bytes(self) -> float:
        return self.top_bytes - self.base_bytes


class _Window(NamedTuple):
    times: Sequence[float]
    values: Sequence[float]
    before: Sequence[float]
    past_peak: float
    """The highest value before the window."""
    slope: float
    growth_bytes: float


def may_grow(candidate: CandidateCurve, steps: StepCounts) -> bool:
    """Return False if no test of this module can pass. It is faster than the tests."""
    if steps.count is not None:
        return True
    columns = (
        candidate.series.column(BLOCK_TIER, candidate.signal, statistic, QUICK_BLOCKS) for statistic in (MEDIAN, MIN)
    )
    return any(len(values) > 1 and not values[-1] - min(values) < GROWING_BYTES / 2 for values in columns)


def recent_growth(candidate: CandidateCurve, steps: StepCounts) -> Growth | None:
    """Return the rise of the last two minutes, if it is one."""
    for statistic in STATISTICS:
        window = _window(candidate, statistic, GROWING_BLOCKS, GROWING_BYTES)
        if window is None:
            continue
        times, values, _, past_peak, slope, growth = window
        counts = steps.counts_at(times)
        steps_done = counts[-1] - counts[0] if counts else 0
        half = GROWING_BLOCKS // 2
        if min(values[-half:]) <= past_peak or mann_kendall(values) <= GROWING_Z:
            continue
        if growth < GROWING_SCATTER_MULTIPLE * spread(times, values, slope):
            continue
        first_slope, second_slope = sen_slope(times[:half], values[:half]), sen_slope(times[half:], values[half:])
        if not _is_within(second_slope, first_slope, HALF_SLOPE_LIMITS):
            continue
        changes = [after - before for before, after in pairwise(values)]
        if min(changes) < -MAX_FALL_RATIO * growth or max(changes) > MAX_RISE_RATIO * growth:
            continue
        bytes_per_step = (values[-1] - values[0]) / steps_done if steps_done else None
        return Growth(
            statistic=statistic,
            onset=times[0],
            base_bytes=values[0],
            top_bytes=values[-1],
            first_slope=slope,
            slope=slope,
            bytes_per_step=bytes_per_step,
        )
    return None


def updated_growth(growth: Growth, candidate: CandidateCurve) -> Growth | None:
    """Return the present state of the rise; None when it has ended or is no longer known."""
    recent = curve_of(candidate.series, BLOCK_TIER, candidate.signal, growth.statistic, ENDED_BLOCKS)
    if not recent.times or candidate.series.times(BLOCK_TIER, 1)[-1] - recent.times[-1] > ENDED_BLOCKS * BLOCK_SECONDS:
        return None
    begin = bisect_left(recent.times, growth.onset)
    times, values = recent.times[begin:], recent.values[begin:]
    if len(values) < GROWING_BLOCKS or values[-1] < growth.base_bytes + growth.growth_bytes / 2:
        return None
    slope = sen_slope(times, values)
    if slope < ENDED_RATIO * growth.first_slope:
        return None
    return growth._replace(top_bytes=max(growth.top_bytes, values[-1]), slope=slope)


def quick_leak(candidate: CandidateCurve, steps: StepCounts) -> Leak | None:
    """Return the leak that the newest block of 15 s completes, if any."""
    for statistic in STATISTICS:
        leak = _quick_leak(candidate, steps, statistic)
        if leak is not None:
            return leak
    return None


def _quick_leak(candidate: CandidateCurve, steps: StepCounts, statistic: int) -> Leak | None:
    window = _window(candidate, statistic, QUICK_BLOCKS, QUICK_BYTES)
    if window is None:
        return None
    times, values, before, past_peak, slope, growth_bytes = window
    if times[0] - candidate.started < QUICK_MIN_AGE_SECONDS or (steps.count is None and slope > STEEP_BYTES_PER_SECOND):
        return None
    if min(values[len(values) // 4 :]) <= past_peak:
        return None
    if spread(times, values, slope) > QUICK_SCATTER_RATIO * growth_bytes:
        return None
    parts = [slice(begin, end) for begin, end in pairwise(_part_limits(len(values), QUICK_PARTS))]
    if not all(_is_within(sen_slope(times[part], values[part]), slope, PART_SLOPE_LIMITS) for part in parts):
        return None
    if max(after - before for before, after in pairwise(values)) > MAX_JUMP_RATIO * (values[-1] - values[0]):
        return None
    third = len(values) // 3
    first_third, last_third = (times[:third], values[:third]), (times[-third:], values[-third:])
    if least_squares(*last_third) < MIN_LAST_SLOPE_RATIO * least_squares(*first_third):
        return None
    if sen_slope(*last_third) < MIN_LAST_MEDIAN_SLOPE_RATIO * sen_slope(*first_third):
        return None
    if not _was_flat(candidate, statistic, len(values), slope, growth_bytes) or not _steps_go_on(steps, times):
        return None
    if is_load_rising(candidate.device, BLOCK_TIER, QUICK_BLOCKS):
        return None
    base_bytes = min(median(before[-FLAT_BLOCKS[0] :]), values[0])
    return Leak(
        signal=candidate.signal,
        statistic=statistic,
        tier=MINUTE,
        blocks=FOLLOWED_MINUTES,
        onset=max(times[0] - (values[0] - base_bytes) / slope, candidate.started),
        base_bytes=base_bytes,
        top_bytes=values[-1],
        slope=slope,
        first_slope=slope,
        significance=mann_kendall(values),
        window_seconds=times[-1] - times[0] + BLOCK_SECONDS,
    )


def _window(candidate: CandidateCurve, statistic: int, blocks: int, min_growth_bytes: float) -> _Window | None:
    """Return the newest blocks, and the slope over them, if they grow by ``min_growth_bytes`` bytes and have enough
    samples.
    """
    newest = candidate.series.column(BLOCK_TIER, candidate.signal, statistic, blocks)
    if len(newest) < blocks or newest[-1] != newest[-1] or newest[-1] - highest(newest[:2]) < min_growth_bytes / 2:
        return None
    whole_curve = curve_of(candidate.series, BLOCK_TIER, candidate.signal, statistic)
    begin = bisect_left(whole_curve.times, candidate.started)
    times, values = whole_curve.times[begin:][-blocks:], whole_curve.values[begin:][-blocks:]
    if len(values) < blocks or times[-1] - times[0] > MAX_SPAN_RATIO * blocks * BLOCK_SECONDS:
        return None
    if sum(whole_curve.counts[-blocks:]) < MIN_SAMPLES * blocks / candidate.speedup:
        return None
    slope = sen_slope(times, values)
    growth_bytes = slope * (times[-1] - times[0])
    if growth_bytes < min_growth_bytes:
        return None
    before = whole_curve.values[begin:-blocks]
    past_peak = max(before, default=-inf)
    if begin == 0:
        past_peak = max(past_peak, whole_curve.past_peak)
    return _Window(times, values, before, past_peak, slope, growth_bytes)


def _was_flat(candidate: CandidateCurve, statistic: int, blocks: int, slope: float, growth_bytes: float) -> bool:
    """Return True if the minutes before the window are flat."""
    whole_curve = curve_of(candidate.series, BLOCK_TIER, candidate.signal, statistic, blocks + FLAT_BLOCKS[1])
    begin = bisect_right(whole_curve.times, candidate.started)
    times, values = whole_curve.times[begin:-blocks], whole_curve.values[begin:-blocks]
    if len(values) < FLAT_BLOCKS[0]:
        return False
    flat_slope = sen_slope(times, values)
    return (
        abs(flat_slope) <= FLAT_SLOPE_RATIO * slope
        and spread(times, values, flat_slope) <= FLAT_SCATTER_RATIO * growth_bytes
    )


def _steps_go_on(steps: StepCounts, times: Sequence[float]) -> bool:
    """Return False if the program counts steps and has done none in most of the blocks."""
    if steps.count is None:
        return True
    counts = steps.counts_at(times)
    return counts is not None and sum(b > a for a, b in pairwise(counts)) >= MIN_STEPPING_RATIO * len(counts)


def _part_limits(count: int, parts: int) -> list[int]:
    return [round(count * part / parts) for part in range(parts + 1)]


def _is_within(value: float, middle: float, limits: tuple[float, float]) -> bool:
    return limits[0] * middle <= value <= limits[1] * middle
