"""Search for a leak with all tests, the course of growth from ``growing`` to the end of a leak, and its line. No I/O.

The interval of the line's slope is that of Sen 1968: quantiles of the slopes of all pairs, from the variance of
Kendall's statistic. Load that lasts longer than a block makes successive points deviate to the same side, so that the
variance is multiplied by (1 + r) / (1 - r), where r is the correlation of successive deviations (Bayley and Hammersley
1946).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import sqrt
from operator import mul
from typing import NamedTuple

from gpumond.diagnosis import leak, messages, serving
from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.diagnosis.growth import BLOCK, Growth, growing, quick, rises, update
from gpumond.diagnosis.leak import OUTSIDE, Leak, LeakCase, curve
from gpumond.diagnosis.tracker import TrackedSeries
from gpumond.diagnosis.trend import deviation, median, sen, slopes, spread
from gpumond.facts.frame import Fit, RefusedKind, Verdict
from gpumond.tick.history import FIVE_MINUTES, HELD, LIVE, MEDIAN, MIN, TIERS, UTILIZATION, History

ONE_SIDED_Z = 1.645
"""Two-sided 90 %."""
MAX_CORRELATION = 0.9
MIN_POINTS, MIN_STEPS = 4, 2
BAND_MULTIPLE = 2.0
"""Half of the width of the residual band, in standard deviations of the scatter."""


YOUNG_SECONDS = 60.0
"""Time after the start of a process before growth is suspected, on the wall clock."""


def search(
    tracked: TrackedSeries, history: History, size: float | None, room: float | None, closed: int
) -> Leak | None:
    """Return the leak that one of the ``closed`` tiers completes, if any. ``size`` and ``room`` are the device's."""
    whole = history.device(tracked.uuid)
    for what in (tracked.main, OUTSIDE) if tracked.counted else (tracked.main,):
        case = LeakCase(
            series=tracked.series,
            device=whole,
            what=what,
            born=tracked.born,
            size=size,
            room=room,
            pace=history.pace,
        )
        found = leak.find(case, closed)
        if found is None and what != OUTSIDE and closed > FIVE_MINUTES:
            found = serving.find(case, tracked.quartiles)
        if found is not None:
            return found
    stairs = tracked.levels.stairs(size) if size else ()
    # The steps of a leak that has ended are still known.
    return leak.update_stairs(leak.from_stairs(stairs, tracked.main), stairs, history.now) if stairs else None


def follow(tracked: TrackedSeries, found: Leak, now: float, closed: int) -> Leak | None:
    """Return the leak's present state; None when it has ended."""
    if found.pause:
        return leak.update_stairs(found, tracked.levels.steps, now)
    if found.by_quartiles:
        return serving.update(found, tracked.quartiles, tracked.series) if closed > FIVE_MINUTES else found
    return leak.update(found, tracked.series, closed)


def watch_growth(tracked: TrackedSeries, history: History, label: str, room: float | None, alone: bool) -> bool:
    """Update the growth of the last minutes, and its verdict, after a block of 15 s. Return True if it is now a leak.

    ``alone``: the series is classified. ``room`` is the device's, ``label`` its name.
    """
    tracked.steps.close(tracked.series.times(BLOCK, 1)[-1])
    case = LeakCase(
        series=tracked.series,
        device=history.device(tracked.uuid),
        what=tracked.main,
        born=tracked.born,
        size=None,
        room=room,
        pace=history.pace,
    )
    began, rising = False, rises(case, tracked.steps)
    if rising and alone and tracked.leak is None:
        tracked.leak = quick(case, tracked.steps)
        began = tracked.leak is not None
    if not alone or tracked.leak is not None:
        tracked.growth = None
    elif tracked.growth is None:
        tracked.growth = growing(case, tracked.steps) if rising else None
    else:
        tracked.growth = update(tracked.growth, case, tracked.steps)
    young = history.now - tracked.born < YOUNG_SECONDS * history.pace
    if tracked.growth is None or young:
        tracked.verdicts.pop("growing", None)
        if tracked.leak is None:
            tracked.allocations.end()
        return began
    for shape in ("warm-up", "steady"):
        tracked.verdicts.pop(shape, None)
    active = tracked.verdicts.get("growing")
    since = history.unix(tracked.growth.onset) if active is None else active.since
    tracked.verdicts["growing"] = _growing(tracked, tracked.growth, label, since, history.pace)
    return began


def allocation_growth(tracked: TrackedSeries, what: int, pace: float) -> AllocationGrowth | None:
    """Return the growth of the number of live allocations since the verdict on the signal ``what`` began."""
    if what != LIVE or not tracked.counted:
        return None
    (at,), (live,) = tracked.series.times(BLOCK, 1), tracked.series.column(BLOCK, LIVE, MIN, 1)
    return tracked.allocations.growth(at, live, pace)


def held_growth(tracked: TrackedSeries, what: int, tier: int, onset: float) -> list[tuple[str, float]]:
    """Return the growth of the held bytes since the onset of a growth of live bytes, as evidence, if it is known.

    It is that of the live bytes if the pools grow with them, and smaller while the memory comes from their cache.
    """
    if what != LIVE:
        return []
    blocks = zip(tracked.series.times(tier), tracked.series.column(tier, HELD), strict=True)
    held = [value for at, value in blocks if at >= onset and value == value]
    return [("held_growth_bytes", held[-1] - held[0])] if len(held) > 1 else []


def _growing(tracked: TrackedSeries, found: Growth, label: str, since: float, pace: float) -> Verdict:
    per_second = found.slope * pace
    evidence: list[tuple[str, float]] = [
        ("slope_bytes_per_second", per_second),
        ("growth_bytes", found.bytes),
    ]
    if found.bytes_a_step is not None:
        evidence.append(("kept_bytes_per_step", found.bytes_a_step))
    evidence += held_growth(tracked, tracked.main, BLOCK, found.onset)
    allocations = allocation_growth(tracked, tracked.main, pace)
    evidence += allocations.evidence if allocations else []
    who = messages.program(tracked.name, tracked.pid, label)
    summary = messages.growing(who, label, 60 * per_second, since, found.bytes_a_step, allocations)
    return tracked.verdict("growing", since, tuple(evidence), summary)


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
            "rise of the device's utilization in the meantime",
            sen(range(len(use)), use) * len(use),
        )


def _larger(allocations: AllocationGrowth | None) -> Iterator[RefusedKind]:
    if allocations and allocations.rises and allocations.ratio is not None:
        yield RefusedKind(
            "larger-allocations",
            "relative growth of the number of live allocations as a share of that of the live bytes",
            allocations.ratio,
        )
