"""What a curve that is no alarm looks like: warm-up, steady, churn, periodic, step-change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpumond.diagnosis.plateaus import Plateaus
from gpumond.diagnosis.trend import mann_kendall, median
from gpumond.history.series import MAX, MIN, MINUTE, Series
from gpumond.model.frame import VerdictKind

SHAPES: tuple[VerdictKind, ...] = ("warm-up", "steady", "churn", "periodic", "step-change")
WARM_UP_SECONDS = 300.0
SLOWER = 0.85
"""Growth slows down if the last third of the minutes adds at most this share of what the first third and the middle
third added."""
LEAST_GROWTH = 64 << 20
"""Bytes."""
LOOK = 15
"""Minutes."""
STEADY = 0.01
MOVING = 0.02
"""As shares of the device's size."""
LEAST_BYTES = 256 << 20
STATIONARY = 1.64
JUMPS = 6
"""In ten minutes, each way."""
JUMP_SAMPLES = 600
STEP_SECONDS = 900.0
"""A step is news for so long."""
SHORTEST_PERIOD, LONGEST_PERIOD = 3, 60
"""Minutes."""
CYCLES = 3


class Shape(NamedTuple):
    kind: VerdictKind
    at: float
    evidence: tuple[tuple[str, float], ...]


def shape(series: Series, what: int, born: float, levels: Plateaus, size: float | None) -> Shape | None:
    """The shape as of the last minute; None if it is none of them. ``size``: of the device."""
    times, medians = series.times(MINUTE, LOOK), series.column(MINUTE, what, count=LOOK)
    known = [i for i, at in enumerate(times) if at >= born and medians[i] == medians[i]]
    if not known:
        return None
    lows, highs = series.column(MINUTE, what, MIN, LOOK), series.column(MINUTE, what, MAX, LOOK)
    medians, low, high = medians[known[0] :], min(lows[i] for i in known), max(highs[i] for i in known)
    now = times[-1]
    level, values = medians[-1], [medians[i - known[0]] for i in known]
    if _keeps_growing(values):
        return None
    if now < born + WARM_UP_SECONDS:
        return Shape("warm-up", born, (("level_bytes", level),))
    whole = size or max(high, 1.0)
    last = levels.last
    if last is not None and now - last.at < STEP_SECONDS:
        return Shape("step-change", last.at, (("step_bytes", last.height),))
    tolerance = max(LEAST_BYTES, STEADY * whole)
    if high - low <= 2 * tolerance and max(medians) - min(medians) <= tolerance:
        return Shape("steady", times[known[0]], (("level_bytes", level), ("range_bytes", high - low)))
    found = _period(series, what, born)
    if found is not None:
        return Shape("periodic", times[known[0]], (("period_seconds", found), ("low_bytes", low), ("high_bytes", high)))
    if abs(mann_kendall(values)) < STATIONARY:
        ups, downs = _jumps(series.samples(what, JUMP_SAMPLES), MOVING * whole)
        if min(ups, downs) >= JUMPS:
            turns: tuple[tuple[str, float], ...] = (("ups", ups), ("downs", downs))
            return Shape("churn", times[known[0]], (*turns, ("low_bytes", low), ("high_bytes", high)))
        if max(values) - min(values) <= MOVING * whole:
            return Shape("steady", times[known[0]], (("level_bytes", median(values)), ("range_bytes", high - low)))
    elif values[-1] > values[0] and levels.level is None and _slows_down(values):
        return Shape("warm-up", born, (("level_bytes", level),))
    return None


def _keeps_growing(values: Sequence[float]) -> bool:
    """The curve has risen in each of the last minutes and does not slow down; False for fewer than four values."""
    rises = _rises(values)
    last = rises[len(rises) // 3 :]
    return len(rises) >= 2 and min(last) > 0 and sum(last) >= LEAST_GROWTH and not _slows_down(values)


def _slows_down(values: Sequence[float]) -> bool:
    """False for fewer than four values."""
    rises = _rises(values)
    third = len(rises) // 3 or 1
    if len(rises) < 2:
        return False
    first, middle, last = sum(rises[:third]), sum(rises[-2 * third : -third]), sum(rises[-third:])
    return last <= SLOWER * min(first, middle)


def _rises(values: Sequence[float]) -> Sequence[float]:
    """Growth from one minute to the next. The first minute is left out: the program allocated what it began with."""
    return [after - before for before, after in pairwise(values[1:])]


def _jumps(samples: Sequence[float], least: float) -> tuple[int, int]:
    """How often the curve went up, and down, by at least so much."""
    known = [value for value in samples if value == value]
    ups = downs = 0
    low = high = known[0] if known else 0.0
    for value in known:
        low, high = min(low, value), max(high, value)
        if value - low >= least:
            ups, low, high = ups + 1, value, value
        elif high - value >= least:
            downs, low, high = downs + 1, value, value
    return ups, downs


def _period(series: Series, what: int, born: float) -> float | None:
    """Seconds from one rise of the curve to the next, if they are alike; by the highest value of each minute."""
    times, highs = series.times(MINUTE), series.column(MINUTE, what, MAX)
    values = [value for at, value in zip(times, highs, strict=True) if at >= born and value == value]
    values = values[-2 * LONGEST_PERIOD :]
    if len(values) < CYCLES * SHORTEST_PERIOD:
        return None
    middle = (min(values) + max(values)) / 2
    rises = [i for i, (one, other) in enumerate(pairwise(values)) if one <= middle < other]
    gaps = [other - one for one, other in pairwise(rises)]
    if len(gaps) < CYCLES - 1 or min(gaps) < SHORTEST_PERIOD or max(gaps) > 1.25 * min(gaps) + 1:
        return None
    return 60.0 * sum(gaps) / len(gaps)
