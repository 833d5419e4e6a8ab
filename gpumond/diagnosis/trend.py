"""Trend statistics that are robust against outliers and ties. No I/O.

``mann_kendall``: H. B. Mann 1945, M. G. Kendall 1975, with the variance corrected for ties and the correction for
continuity. ``sen_slope``: P. K. Sen 1968. Both compare every pair, and are meant for a dozen values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from statistics import median

MAD_TO_STANDARD_DEVIATION = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normal noise."""


def mann_kendall(values: Sequence[float]) -> float:
    """Return the excess of rising over falling pairs in standard deviations; 0 if all values are equal."""
    count = len(values)
    balance = 0
    for i in range(1, count):
        value = values[i]
        for j in range(i):
            before = values[j]
            balance += (value > before) - (value < before)
    if balance == 0:
        return 0.0
    ties = sum(n * (n - 1) * (2 * n + 5) for n in Counter(values).values() if n > 1)
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18
    return (balance - (1 if balance > 0 else -1)) / sqrt(variance)


def sen_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs, per unit of time; 0 for fewer than two values."""
    pairs = slopes(times, values)
    return median(pairs) if pairs else 0.0


def slopes(times: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the slope of each pair of values at different times."""
    return [
        (values[i] - values[j]) / (times[i] - times[j])
        for i in range(1, len(values))
        for j in range(i)
        if times[i] != times[j]
    ]


def spread(times: Sequence[float], values: Sequence[float], slope: float) -> float:
    """Return the robust standard deviation of the values around a line of that slope."""
    residuals = [value - slope * at for at, value in zip(times, values, strict=True)]
    middle = median(residuals)
    return MAD_TO_STANDARD_DEVIATION * median([abs(value - middle) for value in residuals])


def deviation(values: Sequence[float]) -> float:
    """Return the sum of the distances from the median."""
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which that share of ordered values lies, interpolated. Raises IndexError without any."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def least_squares(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope with the least squared error. The median of the pairs ignores the steps of an allocator."""
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    return sum((at - mean_time) * (value - mean_value) for at, value in zip(times, values, strict=True)) / sum(
        (at - mean_time) ** 2 for at in times
    )
