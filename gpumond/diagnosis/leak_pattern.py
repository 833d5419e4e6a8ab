"""How a leak grows: evenly, in stairs, or with the load. Pure."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import isfinite

from gpumond.diagnosis.leak import Leak, curve
from gpumond.history import UTILIZATION
from gpumond.history.series import MINUTE, Series

LEAST = 8
"""Minutes, of each kind."""
BUSY = 0.05
IDLE_SHARE = 0.2
"""In idle minutes it grows at most at this share of the pace of busy ones."""
STAIRS_SHARE = 0.7
STAIRS_MINUTES = 0.34
"""This share of the growth happens in this share of the minutes."""


def form(leak: Leak, series: Series, device: Series) -> str:
    """``linear`` where nothing else can be shown."""
    minutes = curve(series, MINUTE, leak.what, leak.kind)
    begin = max(0, bisect_left(minutes.times, leak.onset) - 1)
    times, values = minutes.times[begin:], minutes.values[begin:]
    if len(values) < LEAST:
        return "linear"
    use = dict(zip(device.times(MINUTE), device.column(MINUTE, UTILIZATION), strict=True))
    idle: list[float] = []
    busy: list[float] = []
    for (_, before), (at, after) in pairwise(zip(times, values, strict=True)):
        ratio = _nearest(use, at)
        if ratio is not None:
            (idle if ratio < BUSY else busy).append(after - before)
    if min(len(idle), len(busy)) >= LEAST:
        pace = sum(busy) / len(busy)
        if pace > 0 and sum(idle) / len(idle) <= IDLE_SHARE * pace:
            return "load-proportional"
    return "stairs" if _in_stairs([after - before for before, after in pairwise(values)]) else "linear"


def _in_stairs(changes: list[float]) -> bool:
    """Most of the growth happens in few of the minutes, and little in the others."""
    rises = sorted(changes, reverse=True)
    few = rises[: max(1, int(STAIRS_MINUTES * len(rises)))]
    up, down = sum(rise for rise in rises if rise > 0), -sum(rise for rise in rises if rise < 0)
    return up > 2 * down and sum(few) >= STAIRS_SHARE * up and rises[len(rises) // 2] < IDLE_SHARE * sum(few) / len(few)


def _nearest(use: dict[float, float], at: float) -> float | None:
    """Series close their minutes at moments of their own."""
    found = min(use, key=lambda other: abs(other - at), default=None)
    if found is None or abs(found - at) > 60 or not isfinite(use[found]):
        return None
    return use[found]
