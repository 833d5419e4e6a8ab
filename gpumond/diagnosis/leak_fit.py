"""Points of a leak, the line through them, the time at which it fills the device, and refused explanations. No I/O.

The interval of the slope is that of Sen 1968: quantiles of the slopes of all pairs, from the variance of Kendall's
statistic. Load that lasts longer than a block makes successive points deviate to the same side, so that the variance is
multiplied by (1 + r) / (1 - r), where r is the correlation of successive deviations (Bayley and Hammersley 1946).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import sqrt
from operator import mul
from typing import NamedTuple

from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.diagnosis.leak import Leak, curve
from gpumond.diagnosis.series import TrackedSeries
from gpumond.diagnosis.trend import deviation, median, sen, slopes, spread
from gpumond.facts.frame import Fit, RefusedKind
from gpumond.tick.history import MEDIAN, TIERS, UTILIZATION, History

ONE_SIDED_Z = 1.645
"""Two-sided 90 %."""
"""Limits of the test statistic, in standard deviations: one in a hundred, and one in twenty, by chance."""


MAX_CORRELATION = 0.9


MIN_POINTS, MIN_STEPS = 4, 2


BAND_MULTIPLE = 2.0
"""Half of the width of the residual band, in standard deviations of the scatter."""


class _Slopes(NamedTuple):
    """Slope of the line, and the limits of its interval, per second of the History's clock."""

    low: float
    middle: float
    high: float


def fit(
    leak: Leak, tracked: TrackedSeries, history: History, room: float | None, allocations: AllocationGrowth | None
) -> Fit | None:
    """Return the line through the points of a leak; None if there are too few. ``room``: free bytes above the device's
    recent peak. ``allocations``: growth of the number of live allocations, if it is known.
    """
    times, values = _points(leak, tracked)
    if len(values) < (MIN_STEPS if leak.pause else MIN_POINTS):
        return None
    slope = _interval(times, values)
    rest = [value - slope.middle * at for at, value in zip(times, values, strict=True)]
    band = BAND_MULTIPLE * spread(times, values, slope.middle)
    now, pace = history.unix(history.now), history.pace
    return Fit(
        points=tuple((history.unix(at), value) for at, value in zip(times, values, strict=True)),
        at=history.unix(times[-1]),
        level_bytes=median(rest) + slope.middle * times[-1],
        slope_bytes_per_second=slope.middle * pace,
        slope_low_bytes_per_second=slope.low * pace,
        slope_high_bytes_per_second=slope.high * pace,
        band_bytes=band,
        full_at=_full(now, room, slope.middle * pace),
        full_at_earliest=_full(now, None if room is None else max(0.0, room - band), slope.high * pace),
        full_at_latest=_full(now, None if room is None else room + band, slope.low * pace),
        refused=(*_refused(times, values, slope.middle, leak, tracked, history), *_larger(allocations)),
    )


def _points(leak: Leak, tracked: TrackedSeries) -> tuple[Sequence[float], Sequence[float]]:
    if leak.pause:
        steps = tracked.levels.steps
        return [step.at for step in steps], [step.after for step in steps]
    if leak.by_quartiles:
        return tracked.quartiles.times[-leak.blocks :], tracked.quartiles.values[-leak.blocks :]
    blocks = curve(tracked.series, leak.tier, leak.what, leak.kind, 2 * leak.blocks)
    begin = bisect_left(blocks.times, leak.onset - TIERS[leak.tier].seconds)
    return blocks.times[begin:], blocks.values[begin:]


def _interval(times: Sequence[float], values: Sequence[float]) -> _Slopes:
    pairs, count = sorted(slopes(times, values)), len(values)
    alike = _correlation(times, values, median(pairs))
    half = ONE_SIDED_Z * sqrt(count * (count - 1) * (2 * count + 5) / 18 * (1 + alike) / (1 - alike))
    low = max(0, round((len(pairs) - half) / 2))
    high = min(len(pairs) - 1, round((len(pairs) + half) / 2))
    return _Slopes(pairs[low], median(pairs), pairs[high])


def _correlation(times: Sequence[float], values: Sequence[float], slope: float) -> float:
    """Return the correlation of successive deviations from the line, at least 0."""
    rest = [value - slope * at for at, value in zip(times, values, strict=True)]
    middle = sum(rest) / len(rest)
    rest = [value - middle for value in rest]
    whole = sum(value * value for value in rest)
    return min(MAX_CORRELATION, max(0.0, sum(map(mul, rest, rest[1:])) / whole)) if whole else 0.0


def _full(now: float, room: float | None, slope: float) -> float | None:
    return None if room is None or slope <= 0 else now + room / slope


def _refused(
    times: Sequence[float], values: Sequence[float], slope: float, leak: Leak, tracked: TrackedSeries, history: History
) -> Iterator[RefusedKind]:
    half = len(values) // 2
    first, last = sen(times[:half], values[:half]), sen(times[-half:], values[-half:])
    if first > 0:
        yield RefusedKind("warm-up", "slope of the last half as a share of that of the first half", last / first)
    if not leak.pause:
        line = deviation([value - slope * at for at, value in zip(times, values, strict=True)])
        step = min(deviation(values[:cut]) + deviation(values[cut:]) for cut in range(2, len(values) - 1))
        if step > 0:
            yield RefusedKind("step-change", "distance from the line as a multiple of that from a step", line / step)
    use = history.device(tracked.uuid).column(leak.tier, UTILIZATION, MEDIAN, len(values))
    if len(use) > 1 and all(ratio == ratio for ratio in use):
        yield RefusedKind(
            "load",
            "rise of the device's utilisation in the meantime",
            sen(range(len(use)), use) * len(use),
        )


def _larger(allocations: AllocationGrowth | None) -> Iterator[RefusedKind]:
    if allocations and allocations.rises and allocations.ratio is not None:
        yield RefusedKind(
            "larger-allocations",
            "relative growth of the number of live allocations as a share of that of the live bytes",
            allocations.ratio,
        )
