"""Is it a leak? The test on one curve of one device or life, and how a leak that was found goes on. Pure.

Growth is a leak if it is significant (Mann-Kendall), large enough (Sen's slope), goes on to the end of the window,
and is a *record*: the last blocks lie above all that this life ever used before, which load that comes and goes
does not. It must be new, or have lasted for two windows without slowing down: a warm-up slows, a cache that fills, too.

Blocks are never shorter than a minute. *Clean* tests ask for little growth and an almost undisturbed line, and need
many samples in a block; *rough* ones bear the noise of serving, and ask for more growth and a nearing end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from gpumond.diagnosis.plateaus import PlateauStep
from gpumond.diagnosis.trend import mann_kendall, median, sen, spread
from gpumond.history import HELD, USED, UTILIZATION
from gpumond.history.series import FIVE_MINUTES, MEDIAN, MIN, MINUTE, QUARTER, SAMPLES, TIERS, Series

MIB = 1 << 20
MINUTE_SECONDS = 60.0
HOUR = 3600.0

OUTSIDE = -1
"""The curve of what a process has beside its pools: used less held."""

SIGNIFICANT = 2.33
LIKELY = 1.64
"""Standard deviations: one in a hundred, and one in twenty, by chance."""
BUSIER = 0.03
"""A rise of the utilisation over the window that is one."""


class LeakTest(NamedTuple):
    """``blocks`` of a tier are looked at, and the last ``above`` of them lie above all before."""

    tier: int
    blocks: int
    above: int
    floor_bytes: float
    floor_ratio: float
    """The least growth over the window, also as a ratio of the device's size."""
    within_seconds: float
    """The device would be full within this time."""
    parts: int
    steady: float
    """Each of so many parts of the window has at least this share of its slope; of two parts, the last one."""
    scatter: float
    """The most scatter around the line, as a share of the growth."""
    samples: float
    """The least number of samples in a block, on average."""
    distinct: float
    """The growth is so many times the scatter of the time before."""


CLEAN = (
    LeakTest(MINUTE, 12, 12, 256 * MIB, 0.0, inf, 3, 0.6, 1 / 12, 12, 4),
    LeakTest(FIVE_MINUTES, 7, 7, 256 * MIB, 0.0, inf, 3, 0.6, 1 / 12, 15, 4),
)
ROUGH = (
    LeakTest(FIVE_MINUTES, 8, 5, 512 * MIB, 0.005, 6 * HOUR, 2, 0.3, 0.5, 3, 6),
    LeakTest(QUARTER, 8, 4, 512 * MIB, 0.005, 48 * HOUR, 2, 0.3, 0.5, 3, 2),
)
WARM_UP_SECONDS = 300.0
RISES = 3
"""A leak goes up at least so often within the window; fewer steps are a change of mind, not a trend."""
RISE = 0.05
"""What counts as a rise, as a share of the growth."""
LARGEST = 0.4
"""No single rise is more than this share of it."""
STILL = 0.5
"""In a clean window the last block still rises, by this share of the slope at least."""
PAST = 24
"""So many blocks before the window tell how the curve wanders."""
NEW = 0.5
LASTING = 0.8
MEAN = 0.5
SPARSE = 2.0
"""A window that takes this many times as long as its blocks has too many gaps."""

RETURNED = 0.3
"""A leak is over when so little of its growth is left …"""
STOPPED = 0.15
"""… or when it goes on at less than this share of its pace …"""
STOPPED_SECONDS = 2700.0
"""… over so long a time."""
UNKNOWN_BLOCKS = 5
LATE = 3.0
"""Stairs are over when the next one is late by so many pauses."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Growth that does not end by itself. Times and slope are of the History's clock."""

    what: int
    kind: int
    tier: int
    blocks: int
    onset: float
    base: float
    top: float
    slope: float
    first_slope: float
    significance: float
    window: float
    """Seconds that were looked at."""
    pause: float = 0.0
    """Of a leak that was told by its stairs alone: the longest time between two of them."""

    @property
    def growth(self) -> float:
        return self.top - self.base


class LeakCurve(NamedTuple):
    times: Sequence[float]
    values: Sequence[float]
    counts: Sequence[float]
    record: float
    """The highest value before the first."""


def curve(series: Series, tier: int, what: int, kind: int = MEDIAN, count: int = SAMPLES) -> LeakCurve:
    """The blocks of one tier in which the signal is known."""
    times, counts = series.times(tier, count), series.counts(tier, count)
    values: Sequence[float]
    if what == OUTSIDE:
        used, held = (series.column(tier, signal, kind, count) for signal in (USED, HELD))
        values, record = [one - other for one, other in zip(used, held, strict=True)], -inf
    else:
        values, record = series.column(tier, what, kind, count), series.records[tier][what]
    if any(value != value for value in values):
        known = [i for i, value in enumerate(values) if value == value]
        times, values, counts = (type(times)("d", [row[i] for i in known]) for row in (times, values, counts))
    return LeakCurve(times, values, counts, record)


class LeakCase(NamedTuple):
    """The curve to be judged: one signal of one device or life that begins at ``born``.

    ``size`` is the device's, ``room`` the bytes until it is full. ``pace``: so many seconds of the series pass in one.
    """

    series: Series
    device: Series
    what: int
    born: float
    size: float | None
    room: float | None
    pace: float


def find(case: LeakCase, closed: int) -> Leak | None:
    """A leak in the tiers that were closed just now."""
    for test in (*CLEAN, *ROUGH):
        if test.tier < closed:
            leak = _passes(case, test, MEDIAN)
            if leak is None and test in CLEAN:
                leak = _passes(case, test, MIN)
            if leak is not None and not _load_rises(case.device, test):
                return leak
    return None


def of_stairs(steps: Sequence[PlateauStep], what: int) -> Leak:
    """A leak that is told by its steps alone."""
    pause = max(after.at - before.at for before, after in pairwise(steps))
    span = steps[-1].at - steps[0].at
    base, top = steps[0].before, steps[-1].after
    # The first step begins the first pause, so that its height is of the time before.
    slope = (top - steps[0].after) / span
    return Leak(what, MEDIAN, MINUTE, 0, steps[0].at, base, top, slope, slope, 0.0, span, pause)


def follow_stairs(leak: Leak, steps: Sequence[PlateauStep], now: float) -> Leak | None:
    """The leak as it is now; None when it fell, or has made no step for long."""
    if len(steps) < 2 or now - steps[-1].at > LATE * leak.pause:
        return None
    slope = (steps[-1].after - steps[0].after) / (steps[-1].at - steps[0].at)
    return replace(leak, top=steps[-1].after, slope=slope)


def follow(leak: Leak, series: Series, closed: int) -> Leak | None:
    """The leak as it is now; None when it is over, or its signal is no more."""
    if leak.tier >= closed:
        return leak
    seconds = TIERS[leak.tier].seconds
    wanted = max(leak.blocks, round(STOPPED_SECONDS / seconds))
    times, values, _, _ = curve(series, leak.tier, leak.what, leak.kind, 2 * wanted)
    if len(values) < 2 or series.times(leak.tier, 1)[-1] - times[-1] > UNKNOWN_BLOCKS * seconds:
        return None
    top = max(leak.top, values[-1])
    if max(values[-2:]) < leak.base + RETURNED * (top - leak.base):
        return None
    begin = bisect_left(times, leak.onset)
    begin = min(begin, max(0, len(times) - leak.blocks))
    slope = sen(times[begin:][-2 * leak.blocks :], values[begin:][-2 * leak.blocks :])
    half = wanted // 2
    # A neighbour that leaves is a fall in one of the halves; the leak goes on in the other.
    late = max(sen(times[-half:], values[-half:]), sen(times[-2 * half : -half], values[-2 * half : -half]))
    if late < STOPPED * leak.first_slope and times[-1] - leak.onset > STOPPED_SECONDS:
        return None
    return replace(leak, top=top, slope=slope if slope > 0 else leak.slope)


def _passes(case: LeakCase, test: LeakTest, kind: int) -> Leak | None:
    times, values, counts, record = _since(curve(case.series, test.tier, case.what, kind), case.born)
    count, above = test.blocks, test.above
    seconds = TIERS[test.tier].seconds
    first = bisect_left(times, case.born + max(WARM_UP_SECONDS, 2 * seconds))
    if len(values) - first < count:
        return None
    low = min(values[-above:])
    if low <= record or low <= max(values[:-above], default=-inf):
        return None
    window, at = values[-count:], times[-count:]
    if at[-1] - at[0] > SPARSE * count * seconds or sum(counts[-count:]) < test.samples * count / case.pace:
        return None
    significance = mann_kendall(window)
    if significance <= SIGNIFICANT:
        return None
    slope = sen(at, window)
    growth = slope * (at[-1] - at[0])
    if growth < max(test.floor_bytes, test.floor_ratio * (case.size or 0.0)):
        return None
    if spread(at, window, slope) > test.scatter * growth or not _in_many_steps(window, growth):
        return None
    if case.room is not None and case.room > slope * test.within_seconds:
        return None
    if not _goes_on(at, window, slope, test) or not _new_or_lasting(times, values, first, count, slope):
        return None
    past = slice(max(first, len(values) - count - PAST), len(values) - count)
    if growth < test.distinct * _scatter(times[past], values[past]):
        return None
    before = values[first:-count][-count:]
    base = median(before) if len(before) else window[0]
    base = min(base, window[0])
    onset = max(times[first], at[-1] - (window[-1] - base) / slope)
    span = at[-1] - at[0] + seconds
    return Leak(case.what, kind, test.tier, count, onset, base, window[-1], slope, slope, significance, span)


def _since(full: LeakCurve, born: float) -> LeakCurve:
    """Without what was before ``born``, if that is not the beginning of the series."""
    begin = bisect_left(full.times, born)
    if begin == 0:
        return full
    return LeakCurve(full.times[begin:], full.values[begin:], full.counts[begin:], -inf)


def _in_many_steps(window: Sequence[float], growth: float) -> bool:
    changes = [after - before for before, after in pairwise(window)]
    rises = sum(1 for change in changes if change > RISE * growth)
    return rises >= RISES and max(changes) <= LARGEST * (window[-1] - window[0])


def _load_rises(device: Series, test: LeakTest) -> bool:
    """The device is ever busier: memory that grows with the load says nothing yet."""
    use = device.column(test.tier, UTILIZATION, MEDIAN, test.blocks)
    if len(use) < test.blocks or any(ratio != ratio for ratio in use):
        return False
    return sen(range(len(use)), use) * len(use) >= BUSIER and mann_kendall(use) > LIKELY


def _scatter(times: Sequence[float], values: Sequence[float]) -> float:
    return spread(times, values, sen(times, values))


def _goes_on(at: Sequence[float], window: Sequence[float], slope: float, test: LeakTest) -> bool:
    if test in CLEAN and window[-1] - window[-2] < STILL * slope * (at[-1] - at[-2]):
        return False
    length = -(-len(window) // test.parts)
    last = len(window) - length
    starts = [last] if test.parts == 2 else [round(last * part / (test.parts - 1)) for part in range(test.parts)]
    return all(
        sen(at[start : start + length], window[start : start + length]) >= test.steady * slope for start in starts
    )


def _new_or_lasting(times: Sequence[float], values: Sequence[float], first: int, count: int, slope: float) -> bool:
    """Flat before the window; or as steep in the window before, and no slower than in all the time since the start."""
    begin = len(values) - count
    earlier = max(first, begin - count)
    if begin - earlier < count // 2:
        return False
    before = sen(times[earlier:begin], values[earlier:begin])
    if before <= NEW * slope:
        return True
    mean = (values[begin] - values[first]) / (times[begin] - times[first])
    return begin - earlier == count and slope >= LASTING * before and slope >= MEAN * mean
