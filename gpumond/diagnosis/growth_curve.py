"""The growth curve of a whole growth: where it begins, whether it was flat before, and whether it slows down. No I/O.

A *growth curve* is the power law ``base + height * age ** exponent`` that fits best. Its exponent is 1 for a line,
smaller for a cache that fills, whose growth slows down, and larger for growth that accelerates. The limits of the
exponent are those at which the residuals are still as small, if successive ones are correlated as they are (Bayley and
Hammersley 1946).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis.trend import sen_slope
from gpumond.facts.units import MIB

EXPONENTS = tuple(1.16**i for i in range(-15, 14))
"""Exponents that are compared: 0.1 to 6.9."""
MAX_POINTS = 24
"""Maximum number of points of a fit; longer curves are reduced to medians of parts."""
MIN_POINTS = 6
NORMAL_QUANTILE_SQUARED = 2.7
"""Square of the 90% quantile of the normal distribution."""
MAX_CORRELATION = 0.8
MIN_DEVIATION_BYTES = 4 * MIB
"""Minimum deviation that is assumed: the quantum of allocators and drivers."""
BEGIN_RATIO = 0.05
"""A growth begins where the curve last was at most this share of it above its lowest level."""
FLAT_SECONDS, LONG_FLAT_SECONDS = 290.0, 480.0
FLAT_RATIO = 0.5
"""Limits of the minimum length of the flat curve before a growth, in seconds, and its share of the growth's age."""
FLAT_SLOPE_RATIO, FLAT_RANGE_RATIO = 0.15, 0.25
"""Maximum slope and range of a flat curve, as shares of those of the growth."""
CONVEX_RATIO = 0.3
"""Maximum share of a growth in the first half of its age, if it began after a flat part that is not its lowest."""
SKIPPED_START_RATIO = 0.25
"""Share of a growth from the start of a process that is skipped: memory that the program allocates at first."""
EARLIER_RATIOS = (0.0, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5, 2.2)
"""Time from the beginning of accelerating growth to the beginning of its visible part, as a share of its age."""
REST_RATIO, RESTING_RATIO = 0.25, 0.6
"""Maximum change of a point at rest, as a share of the mean, and minimum share of such points in a growth by steps."""
MAX_FALLS_RATIO = 0.25
"""Maximum of all falls between the steps, as a share of the rises: more is a load that changes."""
ACCELERATING_EXPONENT, ACCELERATING_RANGE, ACCELERATING_SECONDS = 1.2, 1.5, 1800.0
"""Minimum of the lower limit, maximum ratio of the limits, and minimum age, from which growth accelerates."""


class GrowthCurve(NamedTuple):
    """``exponent`` with its limits, and the age and the height of a growth."""

    age_seconds: float
    height_bytes: float
    exponent: float
    min_exponent: float
    max_exponent: float

    @property
    def slope(self) -> float:
        """Present slope."""
        return self.exponent * self.height_bytes / self.age_seconds

    @property
    def accelerates(self) -> bool:
        narrow = self.max_exponent <= ACCELERATING_RANGE * self.min_exponent and self.max_exponent < EXPONENTS[-1]
        return narrow and self.min_exponent > ACCELERATING_EXPONENT and self.age_seconds >= ACCELERATING_SECONDS

    def seconds_left(self, room_bytes: float, exponent: float) -> float:
        """Return the time until the growth has taken ``room_bytes`` more."""
        return self.age_seconds * float((1 + room_bytes / self.height_bytes) ** (1 / exponent) - 1)


class WholeGrowth(NamedTuple):
    """A growth from its beginning to now, and whether the curve was flat before."""

    begin: float
    base_bytes: float
    times: Sequence[float]
    values: Sequence[float]
    was_flat: bool

    @property
    def age_seconds(self) -> float:
        return self.times[-1] - self.begin

    @property
    def growth_bytes(self) -> float:
        return median(self.values[-3:]) - self.base_bytes


def final_growth(times: Sequence[float], values: Sequence[float]) -> WholeGrowth | None:
    """Return the growth that a curve ends with; None if it does not grow."""
    if len(values) < MIN_POINTS:
        return None
    smooth = [median(values[max(0, i - 1) : i + 2]) for i in range(len(values))]
    low, top = min(smooth), smooth[-1]
    growth = top - low
    if growth <= 0:
        return None
    limit = low + BEGIN_RATIO * growth
    start = next(i for i in range(len(smooth) - 1, -1, -1) if smooth[i] <= limit)
    if start > len(smooth) - 3:
        return None
    middle = bisect_left(times, (times[start] + times[-1]) / 2)
    if smooth[middle] - low < CONVEX_RATIO * growth:
        start = _flat_end(times, smooth, start, middle)
        low = smooth[start]
        growth = top - low
    age, past = times[-1] - times[start], times[start] - times[0]
    needed = min(LONG_FLAT_SECONDS, max(FLAT_SECONDS, FLAT_RATIO * age))
    begin = bisect_left(times, times[start] - max(needed, age))
    was_flat = past >= needed and _is_flat(times[begin : start + 1], smooth[begin : start + 1], growth, growth / age)
    return WholeGrowth(times[start], low, times[start:], values[start:], was_flat)


def _flat_end(times: Sequence[float], values: Sequence[float], start: int, middle: int) -> int:
    """Return the last place until the middle of a growth that ends a flat part, else ``start``: before it, the program
    allocated its initial memory.
    """
    for end in range(middle, start, -1):
        begin = bisect_left(times, times[end] - LONG_FLAT_SECONDS)
        after = (values[-1] - values[end]) / (times[-1] - times[end])
        if begin > start and abs(values[end] - values[begin]) / LONG_FLAT_SECONDS <= FLAT_SLOPE_RATIO * after:
            return end
    return start


def _is_flat(times: Sequence[float], values: Sequence[float], growth: float, slope: float) -> bool:
    times, levels = downsample(times, values, MAX_POINTS)
    return (
        max(levels) - min(levels) <= FLAT_RANGE_RATIO * growth
        and abs(sen_slope(times, levels)) <= FLAT_SLOPE_RATIO * slope
    )


def between_rests(growth: WholeGrowth) -> WholeGrowth | None:
    """Return a growth as its points before each step, if it rests in between; None if it grows without rests.

    With too many falls, or without growth that is left, it has no steps.
    """
    times, values = growth.times, growth.values
    if len(values) < MIN_POINTS:
        return None
    changes = [after - before for before, after in itertools.pairwise(values)]
    net = median(values[-3:]) - values[0]
    limit = max(MIN_DEVIATION_BYTES, REST_RATIO * net / len(changes))
    moves = [abs(change) > limit for change in changes]
    if net > 0 and sum(moves) > (1 - RESTING_RATIO) * len(moves):
        return None
    rises, falls = (sum(max(0.0, sign * change) for change in changes) for sign in (1, -1))
    ends = [i for i, move in enumerate(moves) if move and not (i and moves[i - 1])]
    if net <= 0 or falls > MAX_FALLS_RATIO * rises:
        ends = []
    points = [*ends, len(values) - 1]
    return growth._replace(times=[times[i] for i in points], values=[values[i] for i in points])


def fit_curve(growth: WholeGrowth) -> GrowthCurve | None:
    """Return the curve that fits a growth best; None if it has too few points."""
    begin, times, values = growth.begin, growth.times, growth.values
    if not growth.was_flat:
        start = bisect_left(times, begin + SKIPPED_START_RATIO * growth.age_seconds)
        times, values = times[start:], values[start:]
    if len(values) < MIN_POINTS or growth.age_seconds <= 0:
        return None
    times, levels = downsample(times, values, MAX_POINTS)
    ages = [max(0.0, (one - begin) / growth.age_seconds) for one in times]
    fits = [_fit_line([age**exponent for age in ages], levels) for exponent in EXPONENTS]
    errors = [error + len(levels) * MIN_DEVIATION_BYTES**2 for error, _, _ in fits]
    best = min(range(len(errors)), key=errors.__getitem__)
    _, base, height = fits[best]
    correlation = _autocorrelation(
        [value - base - height * age ** EXPONENTS[best] for age, value in zip(ages, levels, strict=True)]
    )
    limit = errors[best] * (1 + NORMAL_QUANTILE_SQUARED * (1 + correlation) / (1 - correlation) / (len(levels) - 3))
    exponents = [EXPONENTS[i] for i, error in enumerate(errors) if error <= limit]
    return GrowthCurve(growth.age_seconds, growth.growth_bytes, EXPONENTS[best], min(exponents), max(exponents))


def forecasts(growth: WholeGrowth) -> list[GrowthCurve]:
    """Return the courses of a growth that accelerates, the best first, and those that are hardly worse.

    Such a growth is visible only some time after it began, so earlier beginnings are tried as well.
    """
    times, levels = downsample(growth.times, growth.values, MAX_POINTS)
    fits = []
    for earlier in EARLIER_RATIOS:
        age = growth.age_seconds * (1 + earlier)
        begin = growth.times[-1] - age
        for exponent in (one for one in EXPONENTS if one >= 1):
            error, _, height = _fit_line([((one - begin) / age) ** exponent for one in times], levels)
            if height > 0:
                fits.append(
                    (
                        error + len(levels) * MIN_DEVIATION_BYTES**2,
                        GrowthCurve(age, height, exponent, exponent, exponent),
                    )
                )
    fits.sort()
    limit = fits[0][0] * (1 + NORMAL_QUANTILE_SQUARED / (len(levels) - 4)) if fits else 0.0
    return [one for error, one in fits if error <= limit]


def downsample(
    times: Sequence[float], values: Sequence[float], max_points: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Return at most so many points: medians of equally long parts."""
    count = len(values)
    if count <= max_points:
        return times, values
    limits = [round(part * count / max_points) for part in range(max_points + 1)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(limits)]
    return [median(times[part]) for part in parts], [median(values[part]) for part in parts]


def _fit_line(ages: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the sum of squared errors, and the line, of values over transformed ages."""
    count = len(values)
    mean_age, mean_value = sum(ages) / count, sum(values) / count
    square = sum((age - mean_age) ** 2 for age in ages)
    height = (
        sum((age - mean_age) * (value - mean_value) for age, value in zip(ages, values, strict=True)) / square
        if square
        else 0.0
    )
    base = mean_value - height * mean_age
    return sum((value - base - height * age) ** 2 for age, value in zip(ages, values, strict=True)), base, height


def _autocorrelation(residuals: Sequence[float]) -> float:
    total = sum(value * value for value in residuals)
    ratio = sum(one * other for one, other in itertools.pairwise(residuals)) / total if total else 0.0
    return min(MAX_CORRELATION, max(0.0, ratio))
