"""Search for a leak with all tests, and the course of growth: ``growing``, ``leak``, and its end. No I/O."""

from __future__ import annotations

from gpumond.diagnosis import leak, messages, serving
from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.diagnosis.growth import BLOCK, Growth, growing, quick, rises, update
from gpumond.diagnosis.leak import OUTSIDE, Leak, LeakCase
from gpumond.diagnosis.series import TrackedSeries
from gpumond.facts.frame import Verdict
from gpumond.tick.history import FIVE_MINUTES, HELD, LIVE, MIN, History


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
    if tracked.growth is None:
        tracked.verdicts.pop("growing", None)
        if tracked.leak is None:
            tracked.allocations.end()
        return began
    for shape in ("warm-up", "steady"):
        tracked.verdicts.pop(shape, None)
    active = tracked.verdicts.get("growing")
    since = history.unix(tracked.growth.onset) if active is None else active.since
    tracked.verdicts["growing"] = _growing(tracked, tracked.growth, label, since, room, history.pace)
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


def _growing(
    tracked: TrackedSeries, found: Growth, label: str, since: float, room: float | None, pace: float
) -> Verdict:
    per_second = found.slope * pace
    left = None if room is None else room / per_second
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
    summary = messages.growing(who, label, 60 * per_second, since, left, found.bytes_a_step, allocations)
    return tracked.verdict("growing", since, tuple(evidence), summary, left)
