"""Form of a leak: linear, in stairs, or in proportion to the load. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite

from gpumond.diagnosis.leak import Leak, curve
from gpumond.history import UTILIZATION
from gpumond.history.series import MINUTE, Series

MIN_MINUTES = 8
"""Minimum number of minutes of each kind."""
BUSY_RATIO = 0.05
IDLE_GROWTH_RATIO = 0.2
"""Maximum growth in idle minutes, as a share of the growth in busy ones."""
STAIRS_GROWTH_RATIO = 0.7
STAIRS_MINUTES_RATIO = 0.34
"""Share of the growth, and the share of the minutes in which it happens."""


def form(leak: Leak, series: Series, device: Series) -> str:
    """Return the form of a leak; ``linear`` unless another one is evident."""
    minutes = curve(series, MINUTE, leak.what, leak.kind)
    begin = max(0, bisect_left(minutes.times, leak.onset) - 1)
    times, values = minutes.times[begin:], minutes.values[begin:]
    if len(values) < MIN_MINUTES:
        return "linear"
    use = device.times(MINUTE), device.column(MINUTE, UTILIZATION)
    idle: list[float] = []
    busy: list[float] = []
    for (_, before), (at, after) in pairwise(zip(times, values, strict=True)):
        ratio = _nearest(*use, at)
        if ratio is not None:
            (idle if ratio < BUSY_RATIO else busy).append(after - before)
    if min(len(idle), len(busy)) >= MIN_MINUTES:
        pace = sum(busy) / len(busy)
        if pace > 0 and sum(idle) / len(idle) <= IDLE_GROWTH_RATIO * pace:
            return "load-proportional"
    return "stairs" if _in_stairs([after - before for before, after in pairwise(values)]) else "linear"


def _in_stairs(changes: list[float]) -> bool:
    """Return True if most of the growth happens in few minutes and little in the others."""
    rises = sorted(changes, reverse=True)
    few = rises[: max(1, int(STAIRS_MINUTES_RATIO * len(rises)))]
    up, down = sum(rise for rise in rises if rise > 0), -sum(rise for rise in rises if rise < 0)
    return (
        up > 2 * down
        and sum(few) >= STAIRS_GROWTH_RATIO * up
        and rises[len(rises) // 2] < IDLE_GROWTH_RATIO * sum(few) / len(few)
    )


def _nearest(times: Sequence[float], use: Sequence[float], at: float) -> float | None:
    """Return the utilisation at the nearest time, since series close their minutes at different times."""
    after = bisect_left(times, at)
    found = min((after - 1, after), key=lambda i: abs(times[i] - at) if 0 <= i < len(times) else inf)
    if not 0 <= found < len(times) or abs(times[found] - at) > 60 or not isfinite(use[found]):
        return None
    return use[found]
