"""The decision that growth is a leak, from all tests, its curve from ``growing`` to its end, and its line. No I/O.

The line covers the last two thirds of the growth. The interval of its slope is that of the slopes of equal parts, which
contains pauses and changes of the load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import NamedTuple

from gpumond.diagnosis import leak_criteria, sentences
from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.diagnosis.growth import BLOCK_TIER, Growth, may_grow, quick_leak, recent_growth, updated_growth
from gpumond.diagnosis.growth_curve import (
    GrowthCurve,
    WholeGrowth,
    between_rests,
    downsample,
    final_growth,
    fit_curve,
    forecasts,
)
from gpumond.diagnosis.history_recorder import TrackedSeries
from gpumond.diagnosis.leak_criteria import OUTSIDE_POOLS, CandidateCurve, Leak, curve_of, has_risen_with_load
from gpumond.diagnosis.serving_leak import find_serving_leak, updated_serving_leak
from gpumond.diagnosis.trend import deviation, least_squares, sen_slope, spread
from gpumond.facts.frame import GrowthLine, RuledOutCause, Verdict
from gpumond.facts.units import MIB
from gpumond.tick.history import (
    FIVE_MINUTES,
    HELD,
    LIVE,
    MEDIAN,
    MIN,
    MINUTE,
    QUARTER_HOUR,
    TIERS,
    UTILIZATION,
    History,
)

SLOPE_PARTS, STUDENT_T = 6, 2.0
"""Parts whose slopes are compared, and the 95% quantile of Student's distribution with five degrees of freedom."""
MAX_POINTS, MIN_POINTS, MIN_STEPS, LAST_POINTS = 24, 4, 2, 5
"""Numbers of points of a line, of steps of stairs, and of the points from which the level at the end is computed."""
SKIPPED_RATIO = 1 / 3
"""Share of a growth that is left out of its line: its rate changes."""
MIN_LIMIT_FACTOR = 1.12
"""Minimum factor between the time to full and its limits."""
BAND_MULTIPLE = 2.0
"""Half of the width of the residual band, in standard deviations of the scatter."""


STARTUP_SECONDS = 60.0
"""Time after the start of a process before growth is suspected, on the wall clock."""


def find_leak(
    tracked: TrackedSeries,
    history: History,
    device_bytes: float | None,
    room_bytes: float | None,
    closed_tiers: int,
    earlier_bytes: float,
) -> Leak | None:
    """Return the leak that one of the ``closed_tiers`` shortest tiers completes, if any.

    ``earlier_bytes``: bytes up to which the program's earlier processes have grown.
    """
    main_candidate = _candidate(tracked, history, device_bytes, room_bytes)
    for signal in (tracked.main_signal, OUTSIDE_POOLS) if tracked.has_agent_pools else (tracked.main_signal,):
        candidate = main_candidate._replace(signal=signal)
        leak = leak_criteria.find_curve_leak(candidate, closed_tiers)
        if leak is None and signal != OUTSIDE_POOLS and closed_tiers > FIVE_MINUTES:
            leak = find_serving_leak(candidate, tracked.quartiles)
        leak = confirmed_leak(tracked, candidate, leak, earlier_bytes) if leak is not None else None
        if leak is not None:
            return leak
    stairs = tracked.plateaus.stairs(device_bytes) if device_bytes else ()
    # The steps of a leak that has ended are still known.
    leak = (
        leak_criteria.updated_stairs(leak_criteria.from_stairs(stairs, tracked.main_signal), stairs, history.now)
        if stairs
        else None
    )
    if leak is None and closed_tiers > QUARTER_HOUR and tracked.floors.values:
        leak = leak_criteria.from_floors(tracked.floors.rising_floors(), tracked.main_signal)
        return leak if leak is None or leak.top_bytes > max(earlier_bytes, tracked.sawtooth.repeated_bytes) else None
    return confirmed_leak(tracked, main_candidate, leak, earlier_bytes) if leak is not None else None


FLAT_SECONDS, LASTING_SECONDS, UNCOUNTED_SECONDS = 1500.0, 3600.0, 5400.0
"""Age from which growth is a leak: after a flat curve; since the start of a process, when a data set may be cached; and
since then without an agent, which would tell what a step keeps from what it uses.
"""
URGENT_SECONDS, URGENT_RATIO = 720.0, 0.45
"""Age from which growth is a leak once it has taken this share of the memory that was free at its beginning, or if the
program's agent has found the lines that keep the memory.
"""
MODEL_LOAD_SECONDS = 120.0
"""Start of a process, in which a program loads its model."""
LINE_EXPONENT, SURE_EXPONENT = 0.85, 0.6
"""Minimum exponent of a leak's curve, and of its lower limit: growth that slows down is a cache that fills."""
NOISY_EXPONENT = 0.3
"""Minimum exponent of a leak that load hides, whose upper limit is not that of a cache."""
MIN_AGE_RATIO = 0.6
"""Minimum age of a growth, as a share of the window in which it was found."""
MIN_RESTS = 10
"""Minimum number of steps of growth that rests in between."""
FILLING_EXPONENT = 0.9
"""Maximum of the exponent's upper limit of growth that slows down."""
FILLING_BYTES, FILLING_SECONDS = 512 * MIB, 900.0
"""Minimum bytes and age of growth that slows down."""
LATE_PARTS, LATE_RATIO = 6, 0.05
"""Growth that slows down goes on if its last part rises at this share of the mean rate."""


class SlowingGrowth(NamedTuple):
    """Growth that slows down; ``rate`` is its present slope."""

    growth: WholeGrowth
    curve: GrowthCurve
    rate: float


def whole_growth(tracked: TrackedSeries, candidate: CandidateCurve, leak: Leak) -> WholeGrowth | None:
    """Return the growth with which a curve ends, in the shortest blocks that reach back to the start of the process,
    and are not shorter than those in which it was found.
    """
    loaded_at = candidate.started + MODEL_LOAD_SECONDS
    if leak.by_quartiles:
        times, values = tracked.quartiles.times, tracked.quartiles.values
    else:
        times, values = _blocks_since_start(candidate, leak.tier, leak.signal, leak.statistic)
    begin = bisect_left(times, loaded_at)
    return final_growth(times[begin:], values[begin:])


def _blocks_since_start(
    candidate: CandidateCurve, shortest: int, signal: int, statistic: int
) -> tuple[Sequence[float], Sequence[float]]:
    for tier in range(shortest, len(TIERS)):
        blocks = curve_of(candidate.series, tier, signal, statistic)
        if blocks.times and blocks.times[0] <= candidate.started + 2 * TIERS[tier].seconds:
            break
    return blocks.times, blocks.values


def confirmed_leak(tracked: TrackedSeries, candidate: CandidateCurve, leak: Leak, earlier_bytes: float) -> Leak | None:
    """Return the leak that a growth is, from its beginning on; None if it slows down, is too young, or repeats what the
    program did before.

    ``earlier_bytes``: bytes up to which the program's earlier processes have grown.
    """
    if leak.signal != OUTSIDE_POOLS and leak.top_bytes <= max(earlier_bytes, tracked.sawtooth.repeated_bytes):
        return None
    if leak.pause_seconds:
        return leak
    growth = whole_growth(tracked, candidate, leak)
    if growth is None:
        return None
    whole_leak = replace(leak, onset=growth.begin, base_bytes=growth.base_bytes)
    fitted = fit_curve(growth)
    if growth.age_seconds < MIN_AGE_RATIO * leak.window_seconds or not _goes_on_by_steps(candidate, leak, growth):
        return None
    if leak.by_quartiles:
        slows = fitted is not None and (fitted.max_exponent < FILLING_EXPONENT or fitted.exponent < NOISY_EXPONENT)
        return None if slows else whole_leak
    if fitted is None or fitted.exponent < LINE_EXPONENT or fitted.min_exponent < SURE_EXPONENT:
        return None
    is_urgent = candidate.room_bytes is not None and growth.growth_bytes >= URGENT_RATIO * (
        growth.growth_bytes + candidate.room_bytes
    )
    lasting_seconds = LASTING_SECONDS if tracked.has_agent_pools else UNCOUNTED_SECONDS
    needed_seconds = (
        URGENT_SECONDS if is_urgent or tracked.has_retainers else FLAT_SECONDS if growth.was_flat else lasting_seconds
    )
    if growth.age_seconds < needed_seconds or has_risen_with_load(candidate.device, growth.age_seconds):
        return None
    return whole_leak


def _goes_on_by_steps(candidate: CandidateCurve, leak: Leak, growth: WholeGrowth) -> bool:
    """Return False for growth by few or ever rarer steps between rests; True if it is older than the known minutes."""
    minutes = curve_of(candidate.series, MINUTE, leak.signal, MIN)
    begin = bisect_left(minutes.times, growth.begin)
    if begin == 0:
        return True
    steps = between_rests(growth._replace(times=minutes.times[begin:], values=minutes.values[begin:]))
    if steps is None:
        return True
    fitted = fit_curve(steps) if len(steps.values) > MIN_RESTS else None
    return fitted is not None and fitted.exponent >= LINE_EXPONENT and fitted.min_exponent >= SURE_EXPONENT


def slowing_growth(tracked: TrackedSeries, history: History) -> SlowingGrowth | None:
    """Return the growth of a process if it slows down and still goes on."""
    candidate = _candidate(tracked, history, None, None)
    times, values = _blocks_since_start(candidate, MINUTE, tracked.main_signal, MEDIAN)
    begin = bisect_left(times, candidate.started + MODEL_LOAD_SECONDS)
    growth = final_growth(times[begin:], values[begin:])
    if growth is None or growth.growth_bytes < FILLING_BYTES or growth.age_seconds < FILLING_SECONDS:
        return None
    fitted = fit_curve(growth)
    if fitted is None or fitted.max_exponent > FILLING_EXPONENT:
        return None
    late_points = len(growth.values) // LATE_PARTS
    rate = least_squares(growth.times[-late_points:], growth.values[-late_points:]) if late_points > 1 else 0.0
    return SlowingGrowth(growth, fitted, rate) if rate > LATE_RATIO * growth.growth_bytes / growth.age_seconds else None


def _candidate(
    tracked: TrackedSeries, history: History, device_bytes: float | None, room_bytes: float | None
) -> CandidateCurve:
    return CandidateCurve(
        series=tracked.series,
        device=history.device_series(tracked.uuid),
        signal=tracked.main_signal,
        started=tracked.started,
        device_bytes=device_bytes,
        room_bytes=room_bytes,
        speedup=history.speedup,
    )


def updated_leak(tracked: TrackedSeries, leak: Leak, now: float, closed_tiers: int) -> Leak | None:
    """Return the leak's present state; None when it has ended."""
    if leak.pause_seconds:
        return leak_criteria.updated_stairs(leak, tracked.plateaus.steps, now)
    if leak.by_quartiles:
        return updated_serving_leak(leak, tracked.quartiles, tracked.series) if closed_tiers > FIVE_MINUTES else leak
    return leak_criteria.updated_curve_leak(leak, tracked.series, closed_tiers)


def judge_growth(
    tracked: TrackedSeries,
    history: History,
    label: str,
    room_bytes: float | None,
    is_classified: bool,
    earlier_bytes: float,
) -> bool:
    """Update the growth of the last minutes, and its verdict, after a block of 15 s. Return True if it is now a leak.

    ``is_classified``: the series is classified. ``room_bytes`` is the device's, ``label`` its name.
    """
    tracked.steps.close(tracked.series.times(BLOCK_TIER, 1)[-1])
    candidate = _candidate(tracked, history, None, room_bytes)
    leak_began, may_be_growing = False, may_grow(candidate, tracked.steps)
    if may_be_growing and is_classified and tracked.has_agent_pools and tracked.leak is None:
        leak = quick_leak(candidate, tracked.steps)
        if leak is not None and leak.top_bytes > max(earlier_bytes, tracked.sawtooth.repeated_bytes):
            tracked.leak, leak_began = leak, True
    if not is_classified or tracked.leak is not None:
        tracked.growth = None
    elif tracked.growth is None:
        tracked.growth = recent_growth(candidate, tracked.steps) if may_be_growing else None
    else:
        tracked.growth = updated_growth(tracked.growth, candidate)
    is_starting = history.now - tracked.started < STARTUP_SECONDS * history.speedup
    if tracked.growth is None or is_starting:
        tracked.verdicts.pop("growing", None)
        if tracked.leak is None:
            tracked.allocations.reset()
        return leak_began
    for pattern in ("warm-up", "steady"):
        tracked.verdicts.pop(pattern, None)
    active = tracked.verdicts.get("growing")
    since = history.to_unix(tracked.growth.onset) if active is None else active.since
    tracked.verdicts["growing"] = _growing_verdict(tracked, tracked.growth, label, since, history)
    return leak_began


def allocation_growth(tracked: TrackedSeries, signal: int, speedup: float) -> AllocationGrowth | None:
    """Return the growth of the number of live allocations since the verdict on the ``signal`` began."""
    if signal != LIVE or not tracked.has_agent_pools:
        return None
    (at,), (live,) = tracked.series.times(BLOCK_TIER, 1), tracked.series.column(BLOCK_TIER, LIVE, MIN, 1)
    return tracked.allocations.growth(at, live, speedup)


def held_growth(tracked: TrackedSeries, signal: int, tier: int, onset: float) -> list[tuple[str, float]]:
    """Return the growth of the held bytes since the onset of a growth of live bytes, as evidence, if it is known.

    It is that of the live bytes if the pools grow with them, and smaller while the memory comes from their cache.
    """
    if signal != LIVE:
        return []
    blocks = zip(tracked.series.times(tier), tracked.series.column(tier, HELD), strict=True)
    held = [value for at, value in blocks if at >= onset and value == value]
    return [("held_growth_bytes", held[-1] - held[0])] if len(held) > 1 else []


def _growing_verdict(tracked: TrackedSeries, growth: Growth, label: str, since: float, history: History) -> Verdict:
    speedup, now = history.speedup, history.to_unix(history.now)
    per_second = growth.slope * speedup
    evidence: list[tuple[str, float]] = [
        ("slope_bytes_per_second", per_second),
        ("growth_bytes", growth.growth_bytes),
    ]
    if growth.bytes_per_step is not None:
        evidence.append(("kept_bytes_per_step", growth.bytes_per_step))
    evidence += held_growth(tracked, tracked.main_signal, BLOCK_TIER, growth.onset)
    allocations = allocation_growth(tracked, tracked.main_signal, speedup)
    evidence += allocations.evidence if allocations else []
    who = sentences.program_text(tracked.name, tracked.pid, label)
    summary = sentences.growing(who, label, 60 * per_second, since, now, growth.bytes_per_step, allocations)
    return tracked.verdict("growing", since, tuple(evidence), summary)


class _Slopes(NamedTuple):
    """Slope of the line, and the limits of its interval, per second of the History's clock."""

    low: float
    middle: float
    high: float


def fit_leak_line(
    leak: Leak, tracked: TrackedSeries, history: History, room_bytes: float | None, allocations: AllocationGrowth | None
) -> GrowthLine | None:
    """Return the line through the points of a leak; None if there are too few.

    ``room_bytes``: free bytes above the device's recent peak. ``allocations``: growth of the number of
    live allocations, if it is known.

    The slope of growth that accelerates is that at its end, and its device is full when its curve reaches the size.
    """
    times, values, curves = _points(leak, tracked, history, room_bytes)
    if len(values) < (MIN_STEPS if leak.pause_seconds else MIN_POINTS):
        return None
    slope = _slope_interval(times, values)
    now, speedup = history.to_unix(history.now), history.speedup
    full, earliest, latest = (
        None if room_bytes is None else _seconds_to_full(room_bytes, one)
        for one in (slope.middle, slope.high, slope.low)
    )
    if curves:
        slopes = [one.slope for one in curves]
        slope = _Slopes(min(slopes), slopes[0], max(slopes))
        if room_bytes is not None:
            seconds_left = [one.seconds_left(room_bytes, one.exponent) for one in curves]
            full, earliest, latest = seconds_left[0], min(seconds_left), max(seconds_left)
    residuals = [value - slope.middle * at for at, value in zip(times, values, strict=True)]
    if full is not None and earliest is not None:
        earliest, latest = (
            min(earliest, full / MIN_LIMIT_FACTOR),
            None if latest is None else max(latest, full * MIN_LIMIT_FACTOR),
        )
    return GrowthLine(
        points=tuple((history.to_unix(at), value) for at, value in zip(times, values, strict=True)),
        at=history.to_unix(times[-1]),
        level_bytes=median(residuals[-LAST_POINTS:]) + slope.middle * times[-1],
        slope_bytes_per_second=slope.middle * speedup,
        slope_low_bytes_per_second=slope.low * speedup,
        slope_high_bytes_per_second=slope.high * speedup,
        band_bytes=BAND_MULTIPLE * spread(times, values, slope.middle),
        full_at=None if full is None else now + full / speedup,
        full_at_earliest=None if earliest is None else now + earliest / speedup,
        full_at_latest=None if latest is None else now + latest / speedup,
        ruled_out=(
            *_ruled_out_causes(times, values, slope.middle, leak, tracked, history),
            *_larger_allocations(allocations),
        ),
    )


def _points(
    leak: Leak, tracked: TrackedSeries, history: History, room_bytes: float | None
) -> tuple[Sequence[float], Sequence[float], Sequence[GrowthCurve]]:
    """Return the points of the last two thirds of a growth, and its courses if it accelerates."""
    if leak.pause_seconds:
        steps = tracked.plateaus.steps
        return [step.at for step in steps], [step.after for step in steps], ()
    candidate = _candidate(tracked, history, None, room_bytes)
    growth = whole_growth(tracked, candidate, leak)
    if growth is None:
        blocks = curve_of(tracked.series, leak.tier, leak.signal, leak.statistic, leak.blocks)
        return blocks.times, blocks.values, ()
    begin = bisect_left(growth.times, growth.begin + SKIPPED_RATIO * growth.age_seconds)
    fitted = fit_curve(growth)
    courses = forecasts(growth) if fitted is not None and fitted.accelerates else ()
    return *downsample(growth.times[begin:], growth.values[begin:], MAX_POINTS), courses


def _slope_interval(times: Sequence[float], values: Sequence[float]) -> _Slopes:
    """Return the slope with the least squared error, and its interval: that of the slopes of equal parts."""
    slope = least_squares(times, values)
    parts = min(SLOPE_PARTS, len(values) // 2)
    limits = [round(part * (len(values) - 1) / parts) for part in range(parts + 1)]
    slopes = [(values[end] - values[begin]) / (times[end] - times[begin]) for begin, end in pairwise(limits)]
    mean = sum(slopes) / parts
    error = sqrt(sum((one - mean) ** 2 for one in slopes) / (parts - 1) / parts) if parts > 1 else abs(slope)
    half = STUDENT_T * error
    return _Slopes(slope - half, slope, slope + half)


def _seconds_to_full(room_bytes: float, slope: float) -> float | None:
    return room_bytes / slope if slope > 0 else None


def _ruled_out_causes(
    times: Sequence[float], values: Sequence[float], slope: float, leak: Leak, tracked: TrackedSeries, history: History
) -> Iterator[RuledOutCause]:
    half = len(values) // 2
    first_slope, last_slope = sen_slope(times[:half], values[:half]), sen_slope(times[-half:], values[-half:])
    if first_slope > 0:
        yield RuledOutCause("warm-up", "last half's slope relative to the first half's", last_slope / first_slope)
    if not leak.pause_seconds:
        line = deviation([value - slope * at for at, value in zip(times, values, strict=True)])
        step = min(deviation(values[:cut]) + deviation(values[cut:]) for cut in range(2, len(values) - 1))
        if step > 0:
            yield RuledOutCause(
                "step-change", "distance from the line, relative to the distance from a step", line / step
            )
    utilizations = history.device_series(tracked.uuid).column(leak.tier, UTILIZATION, MEDIAN, len(values))
    if len(utilizations) > 1 and all(ratio == ratio for ratio in utilizations):
        yield RuledOutCause(
            "load",
            "rise of the device's utilization in the meantime",
            sen_slope(range(len(utilizations)), utilizations) * len(utilizations),
        )


def _larger_allocations(allocations: AllocationGrowth | None) -> Iterator[RuledOutCause]:
    if allocations and allocations.number_rises and allocations.ratio is not None:
        yield RuledOutCause(
            "larger-allocations",
            "relative growth of the live allocation count, as a fraction of the live bytes' growth",
            allocations.ratio,
        )
