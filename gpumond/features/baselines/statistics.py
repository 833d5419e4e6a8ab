"""Statistics of baselines: the distribution of a workload's memory over time, and the difference of two of them. No
I/O.

Consecutive seconds are similar, so single seconds would give a false certainty. Values are gathered in at most
``MAX_PERIODS`` periods of equal length, and the median of each counts.

The typical difference is the Hodges-Lehmann shift: the median of all differences between a period after and one
before. Its interval is Moses' (Hollander and Wolfe, Nonparametric Statistical Methods, section 4.3): the differences
whose ranks the Mann-Whitney test would not reject. Neither assumes a distribution, a quarter of outliers moves neither
far, and nothing is random: the same measurements give the same result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf, sqrt
from statistics import median

from gpumond.diagnosis.trend import quantile
from gpumond.facts import units

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The form of a baseline's name."""

MAX_PERIODS = 120
CONFIDENCE_Z = 1.96
"""Quantile of the normal distribution for 95%, two-sided."""

MEASURES = ("live", "held", "reclaimable", "stranded", "overhead", "used", "utilization", "flush_yield")
"""Bytes of a workload over all its processes and devices; utilization: the ratio of its devices; flush_yield: what each
flush released."""

ShiftEstimate = tuple[float, float | None, float | None]

_THRESHOLD = re.compile(r"\s*([a-z_]+)_(peak|typical|rate)\s*([<>])\s*(.+?)\s*")


@dataclass(frozen=True, slots=True)
class Distribution:
    """``levels`` are the periods' medians, and ``typical`` is their median; 90% are between ``low`` and ``high``."""

    peak: float
    typical: float
    low: float
    high: float
    levels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MeasureDistribution:
    """One measure of one workload."""

    measure: str
    distribution: Distribution


@dataclass(frozen=True, slots=True)
class WorkloadMeasures:
    """``retries`` is None where no allocator counts them. The workload of a program without an agent is its name in
    brackets.
    """

    workload: str
    seconds: float
    measures: tuple[MeasureDistribution, ...]
    retries: int | None = None
    flushes: int = 0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Measures recorded from ``started_at`` (unix) for ``seconds`` of the requested ``for_seconds``."""

    name: str
    workload: str | None
    started_at: float
    for_seconds: float
    seconds: float
    complete: bool
    workloads: tuple[WorkloadMeasures, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """``difference`` is after - before; it is between ``low`` and ``high`` with 95% confidence where that is known.

    ``stat``: the peak, the typical value, or the rate per hour. ``ratio``: the difference as a fraction of the value
    before. None: not observed on that side.
    """

    workload: str
    measure: str
    stat: str
    before: float | None
    after: float | None
    difference: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        return f"{self.measure}_{self.stat}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A baseline and a later recording; ``complete`` if the later one is."""

    name: str
    before_started_at: float
    after_started_at: float
    before_seconds: float
    after_seconds: float
    complete: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Threshold:
    """``live_peak>5%``: too much if it grew by more; ``utilization_typical<-10%``: if it fell by more."""

    text: str
    name: str
    above: bool
    bound: float
    relative: bool

    def is_exceeded_by(self, difference: Difference) -> bool:
        """Return True if the difference exceeds the threshold; an increase from zero exceeds any share."""
        if difference.name != self.name or difference.difference is None:
            return False
        change = difference.difference
        if self.relative:
            change = difference.ratio if difference.ratio is not None else inf if change > 0 else 0.0
        return change > self.bound if self.above else change < self.bound


class Periods:
    """Values in order of time, in at most ``MAX_PERIODS`` periods; when there are too many, pairs are merged."""

    def __init__(self) -> None:
        self._values_per_period = 1
        self._peak = 0.0
        self._current: list[float] = []
        self._levels: list[float] = []

    def add(self, value: float) -> None:
        self._peak = max(self._peak, value)
        self._current.append(value)
        if len(self._current) < self._values_per_period:
            return
        self._levels.append(median(self._current))
        self._current = []
        if len(self._levels) == MAX_PERIODS:
            pairs = zip(self._levels[::2], self._levels[1::2], strict=True)
            self._levels = [(one + other) / 2 for one, other in pairs]
            self._values_per_period *= 2

    def distribution(self) -> Distribution | None:
        """Return None before the first value. A last period that is less than half full counts for the peak alone."""
        levels = self._levels
        if self._current and (2 * len(self._current) >= self._values_per_period or not levels):
            levels = [*levels, median(self._current)]
        if not levels:
            return None
        ordered = sorted(levels)
        return Distribution(
            self._peak, median(ordered), quantile(ordered, 0.05), quantile(ordered, 0.95), tuple(levels)
        )


def estimate_shift(before: Sequence[float], after: Sequence[float]) -> ShiftEstimate:
    """Return the Hodges-Lehmann shift from ``before`` to ``after`` and its 95% interval; None for too few values."""
    differences = sorted(later - earlier for earlier in before for later in after)
    before_count, after_count = len(before), len(after)
    position = floor(
        before_count * after_count / 2
        - CONFIDENCE_Z * sqrt(before_count * after_count * (before_count + after_count + 1) / 12)
    )
    if position < 1:
        return median(differences), None, None
    return median(differences), differences[position - 1], differences[-position]


def compare(before: Baseline, after: Baseline) -> Comparison:
    """Compare every measure of every workload on either side; workloads in order of their names."""
    old = {each.workload: each for each in before.workloads}
    new = {each.workload: each for each in after.workloads}
    names = sorted(old.keys() | new.keys())
    differences = tuple(each for name in names for each in _differences(name, old.get(name), new.get(name)))
    return Comparison(
        before.name,
        before.started_at,
        after.started_at,
        before.seconds,
        after.seconds,
        after.complete,
        differences,
    )


def parse_measure_threshold(text: str) -> Threshold:
    """Parse a threshold. Raises ValueError."""
    match = _THRESHOLD.fullmatch(text)
    names = {*MEASURES, "retries"}
    if match is None or match[1] not in names or (match[2] == "rate") != (match[1] == "retries"):
        raise ValueError(
            "expected a comparison such as live_peak>5%, used_typical>512MiB or retries_rate>0; "
            f"measures with _peak or _typical: {', '.join(MEASURES)}; with _rate: retries"
        )
    return Threshold(
        text, f"{match[1]}_{match[2]}", match[3] == ">", units.parse_threshold(match[4]), match[4].endswith("%")
    )


def _differences(workload: str, old: WorkloadMeasures | None, new: WorkloadMeasures | None) -> Iterator[Difference]:
    before, after = _distributions(old), _distributions(new)
    for measure in MEASURES:
        earlier, later = before.get(measure), after.get(measure)
        if earlier is not None or later is not None:
            yield _difference(
                workload, measure, "peak", earlier.peak if earlier else None, later.peak if later else None
            )
            estimate = estimate_shift(earlier.levels, later.levels) if earlier and later else None
            typical_values = earlier.typical if earlier else None, later.typical if later else None
            yield _difference(workload, measure, "typical", *typical_values, estimate)
    rates = _per_hour(old), _per_hour(new)
    if rates != (None, None):
        yield _difference(workload, "retries", "rate", *rates)


def _difference(
    workload: str,
    measure: str,
    stat: str,
    before: float | None,
    after: float | None,
    estimate: ShiftEstimate | None = None,
) -> Difference:
    if before is None or after is None:
        return Difference(workload, measure, stat, before, after)
    change, low, high = estimate or (after - before, None, None)
    return Difference(workload, measure, stat, before, after, change, change / before if before else None, low, high)


def _distributions(side: WorkloadMeasures | None) -> dict[str, Distribution]:
    return {each.measure: each.distribution for each in side.measures} if side else {}


def _per_hour(side: WorkloadMeasures | None) -> float | None:
    if side is None or side.retries is None or not side.seconds:
        return None
    return side.retries * 3600 / side.seconds
