"""Search for a leak with all tests, and the development of the leak that was found. No I/O."""

from __future__ import annotations

from gpumond.diagnosis import leak, serving
from gpumond.diagnosis.leak import OUTSIDE, Leak, LeakCase
from gpumond.diagnosis.tracked_series import TrackedSeries
from gpumond.history import History
from gpumond.history.series import FIVE_MINUTES


def search(
    tracked: TrackedSeries, history: History, size: float | None, room: float | None, closed: int
) -> Leak | None:
    """Return the leak that one of the ``closed`` tiers completes, if any. ``size`` and ``room`` are the device's."""
    whole = history.device(tracked.uuid)
    for what in (tracked.main, OUTSIDE) if tracked.counted else (tracked.main,):
        case = LeakCase(tracked.series, whole, what, tracked.born, size, room, history.pace)
        found = leak.find(case, closed)
        if found is None and what != OUTSIDE and closed > FIVE_MINUTES:
            found = serving.find(case, tracked.quartiles)
        if found is not None:
            return found
    stairs = tracked.levels.stairs(size) if size else ()
    return leak.from_stairs(stairs, tracked.main) if stairs else None


def follow(tracked: TrackedSeries, found: Leak, now: float, closed: int) -> Leak | None:
    """Return the leak's present state; None when it has ended."""
    if found.pause:
        return leak.update_stairs(found, tracked.levels.steps, now)
    if found.by_quartiles:
        return serving.update(found, tracked.quartiles, tracked.series) if closed > FIVE_MINUTES else found
    return leak.update(found, tracked.series, closed)
