"""Patterns of healthy curves: warm-up, steady, churn, periodic, step-change. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis.trend import mann_kendall
from gpumond.facts.units import MINUTE_SECONDS
from gpumond.facts.verdicts import VerdictName
from gpumond.tick.history import MAX, MIN, MINUTE, Series

WARM_UP_SECONDS = 300.0
SLOWER_RATIO = 0.85
"""Maximum growth in the last third of the minutes, as a share of that in the first and in the middle third, of a curve
that slows down.
"""
MIN_GROWTH_BYTES = 64 << 20
"""Minimum growth of a curve that keeps growing, in the last two thirds of the minutes."""
WINDOW_MINUTES = 15
"""Evaluated minutes."""
STEADY_RATIO = 0.01
MOVING_RATIO = 0.02
"""Tolerances as shares of the device's size."""
MIN_TOLERANCE_BYTES = 256 << 20
STATIONARY_Z = 1.64
MIN_JUMPS = 6
"""Minimum number of jumps in ten minutes, in each direction."""
JUMP_SAMPLES = 600
STEP_SECONDS = 900.0
"""Time in seconds for which a step determines the pattern."""
MIN_PERIOD_MINUTES, MAX_PERIOD_MINUTES = 3, 60
"""Limits of the period in minutes."""
MIN_CYCLES = 3


class UsePattern(NamedTuple):
    kind: VerdictName
    at: float
    evidence: tuple[tuple[str, float], ...]


def pattern_of(
    series: Series, signal: int, started: float, plateaus: Plateaus, device_bytes: float | None
) -> UsePattern | None:
    """Return the pattern as of the last minute; None if it has none of these patterns."""
    times, medians = series.times(MINUTE, WINDOW_MINUTES), series.column(MINUTE, signal, count=WINDOW_MINUTES)
    valid = [i for i, at in enumerate(times) if at >= started and medians[i] == medians[i]]
    if not valid:
        return None
    lows, highs = series.column(MINUTE, signal, MIN, WINDOW_MINUTES), series.column(MINUTE, signal, MAX, WINDOW_MINUTES)
    low, high = min(lows[i] for i in valid), max(highs[i] for i in valid)
    now, values = times[-1], [medians[i] for i in valid]
    level = values[-1]
    if _keeps_growing(values):
        return None
    if now + MINUTE_SECONDS < started + WARM_UP_SECONDS:  # the last minute ended before
        return UsePattern("warm-up", started, (("level_bytes", level),))
    device_bytes = device_bytes or max(high, 1.0)
    last_step = plateaus.last_step
    if last_step is not None and now - last_step.at < STEP_SECONDS:
        return UsePattern("step-change", last_step.at, (("step_bytes", last_step.height),))
    tolerance = max(MIN_TOLERANCE_BYTES, STEADY_RATIO * device_bytes)
    if high - low <= 2 * tolerance and max(values) - min(values) <= tolerance:
        return UsePattern("steady", times[valid[0]], (("level_bytes", level), ("range_bytes", high - low)))
    period_seconds = _period(series, signal, started)
    if period_seconds is not None:
        return UsePattern(
            "periodic", times[valid[0]], (("period_seconds", period_seconds), ("low_bytes", low), ("high_bytes", high))
        )
    if abs(mann_kendall(values)) < STATIONARY_Z:
        ups, downs = _jumps(series.samples(signal, JUMP_SAMPLES), MOVING_RATIO * device_bytes)
        if min(ups, downs) >= MIN_JUMPS:
            jumps: tuple[tuple[str, float], ...] = (("ups", ups), ("downs", downs))
            return UsePattern("churn", times[valid[0]], (*jumps, ("low_bytes", low), ("high_bytes", high)))
        if max(values) - min(values) <= MOVING_RATIO * device_bytes:
            return UsePattern("steady", times[valid[0]], (("level_bytes", median(values)), ("range_bytes", high - low)))
    elif values[-1] > values[0] and plateaus.level is None and _slows_down(values):
        return UsePattern("warm-up", started, (("level_bytes", level),))
    return None


def has_left_level(level: float, medians: Sequence[float], device_bytes: float | None) -> bool:
    """Return whether the last minute is farther from the level of a steady curve than any of its minutes."""
    return bool(medians) and abs(medians[-1] - level) > max(
        2 * MIN_TOLERANCE_BYTES, MOVING_RATIO * (device_bytes or 0.0)
    )


def _keeps_growing(values: Sequence[float]) -> bool:
    """Return True if the curve rose in each of the last minutes without slowing down; False for under four values."""
    rises = _rises(values)
    last_rises = rises[len(rises) // 3 :]
    return len(rises) >= 2 and min(last_rises) > 0 and sum(last_rises) >= MIN_GROWTH_BYTES and not _slows_down(values)


def _slows_down(values: Sequence[float]) -> bool:
    """Return True if growth slows down; False for fewer than four values."""
    rises = _rises(values)
    third = len(rises) // 3 or 1
    if len(rises) < 2:
        return False
    first, middle, last = sum(rises[:third]), sum(rises[-2 * third : -third]), sum(rises[-third:])
    return last <= SLOWER_RATIO * min(first, middle)


def _rises(values: Sequence[float]) -> Sequence[float]:
    """Return the growth from minute to minute, without the first, in which the program allocates its initial memory."""
    return [after - before for before, after in pairwise(values[1:])]


def _jumps(samples: Sequence[float], min_jump: float) -> tuple[int, int]:
    """Return how often the curve went up, and down, by at least ``min_jump``."""
    values = [value for value in samples if value == value]
    ups = downs = 0
    low = high = values[0] if values else 0.0
    for value in values:
        low, high = min(low, value), max(high, value)
        if value - low >= min_jump:
            ups, low, high = ups + 1, value, value
        elif high - value >= min_jump:
            downs, low, high = downs + 1, value, value
    return ups, downs


def _period(series: Series, signal: int, started: float) -> float | None:
    """Return the seconds between two rises of the minutes' peaks, if these are regular; else None."""
    times, highs = series.times(MINUTE), series.column(MINUTE, signal, MAX)
    values = [value for at, value in zip(times, highs, strict=True) if at >= started and value == value]
    values = values[-2 * MAX_PERIOD_MINUTES :]
    if len(values) < MIN_CYCLES * MIN_PERIOD_MINUTES:
        return None
    middle = (min(values) + max(values)) / 2
    rises = [i for i, (one, other) in enumerate(pairwise(values)) if one <= middle < other]
    gaps = [other - one for one, other in pairwise(rises)]
    if len(gaps) < MIN_CYCLES - 1 or min(gaps) < MIN_PERIOD_MINUTES or max(gaps) > 1.25 * min(gaps) + 1:
        return None
    return 60.0 * sum(gaps) / len(gaps)


REST_MINUTES = 3
ALIKE_RATIO = 0.02
STEP_RATIO = 0.05
"""Tolerance of a level, and minimum height of a step, as shares of the device's size."""

PEAK_MULTIPLE = 1.5
"""Minimum rise of the peak, as a multiple of the retained bytes."""
RETENTIONS = ((2, 0.12), (3, 0.08))
"""Retentions that are a leak: their number, and the minimum height of each as a share of the device's size."""
RETENTION_HEIGHT_RATIO = 1.25
MIN_STAIRS = 4
MAX_PAUSE_RATIO = 1.35
"""Maximum ratio of the longest time between stairs to the shortest."""
MAX_HEIGHT_RATIO = 1.5
"""Maximum ratio of the highest stair to the lowest, without the first."""
EXACT_PAUSE_RATIO = 1.06
"""Maximum ratio of the times between stairs of any height."""
LONGEST_PAUSE_SECONDS = 7200.0
LARGE_STAIRS = 3
LARGE_RATIO = 0.1
LARGE_FIRST_RATIO = 3.0
LARGE_PAUSE_SECONDS = 3600.0
"""Large steps that are a leak: their number, minimum height as a share of the device, maximum height of the first as a
multiple of the others, since it contains the memory of the first evaluation, and longest time between two.
"""


class PlateauStep(NamedTuple):
    at: float
    before: float
    after: float
    peak: float

    @property
    def height(self) -> float:
        return self.after - self.before

    @property
    def is_retained(self) -> bool:
        return self.peak - self.before >= PEAK_MULTIPLE * self.height


class Plateaus:
    """Level at which a curve rests, and the steps up since it last fell."""

    def __init__(self) -> None:
        self.level: float | None = None
        self.steps: list[PlateauStep] = []
        self.last_step: PlateauStep | None = None
        """The last step, up or down."""
        self._peak = 0.0
        self._left_at = 0.0

    def add(self, at: float, medians: Sequence[float], high: float, device_bytes: float) -> None:
        """Add a minute. ``medians``: those of the last minutes, the newest of which began at ``at`` and peaked
        at ``high``.
        """
        newest = medians[-1]
        if self.level is not None and abs(newest - self.level) <= ALIKE_RATIO * device_bytes:
            self._peak, self._left_at = high, at
        else:
            self._peak = max(self._peak, high)
        rest = medians[-REST_MINUTES:]
        if len(rest) < REST_MINUTES or max(rest) - min(rest) > ALIKE_RATIO * device_bytes:
            return
        if self.level is None:
            self.level = newest
        elif abs(newest - self.level) >= STEP_RATIO * device_bytes:
            self.last_step = PlateauStep(self._left_at, self.level, newest, self._peak)
            self.steps = [*self.steps[-(MIN_STAIRS - 1) :], self.last_step] if newest > self.level else []
        if abs(newest - self.level) > ALIKE_RATIO * device_bytes or newest == self.level:
            self._peak, self._left_at = high, at
        self.level = newest

    def stairs(self, device_bytes: float) -> Sequence[PlateauStep]:
        """Return the steps that are a leak; empty if none are."""
        for count, ratio in RETENTIONS:
            retained = [step for step in self.steps if step.is_retained and step.height >= ratio * device_bytes]
            newest = retained[-count:]
            is_soon = len(newest) == count and newest[-1].at - newest[-2].at <= LONGEST_PAUSE_SECONDS
            if is_soon and _are_similar([step.height for step in newest], RETENTION_HEIGHT_RATIO):
                return retained
        large = self.steps[-LARGE_STAIRS:]
        if len(large) == LARGE_STAIRS and min(step.height for step in large) >= LARGE_RATIO * device_bytes:
            pauses = [after.at - before.at for before, after in pairwise(large)]
            first, *heights = (step.height for step in large)
            is_even = _are_similar(heights, MAX_HEIGHT_RATIO) and _are_similar([first, *heights], LARGE_FIRST_RATIO)
            if is_even and _are_similar(pauses, EXACT_PAUSE_RATIO) and max(pauses) <= LARGE_PAUSE_SECONDS:
                return large
        if len(self.steps) < MIN_STAIRS:
            return ()
        pauses = [after.at - before.at for before, after in pairwise(self.steps)]
        heights = [step.height for step in self.steps[1:]]
        is_regular = (
            _are_similar(pauses, MAX_PAUSE_RATIO) and _are_similar(heights, MAX_HEIGHT_RATIO)
        ) or _are_similar(pauses, EXACT_PAUSE_RATIO)
        return self.steps if is_regular and max(pauses) <= LONGEST_PAUSE_SECONDS else ()


def _are_similar(values: Sequence[float], factor: float) -> bool:
    return max(values) <= factor * min(values)
