"""Programs with the same name that grow together on several devices: one verdict for all of them. No I/O.

The ranks of one training leak together, and replicas of one service grow together under load. One verdict reports all
of them with their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from math import inf

from gpumond.diagnosis import messages
from gpumond.diagnosis.tracked_series import TrackedSeries
from gpumond.history import SeriesKey
from gpumond.model.frame import Verdict

MIN_DEVICES = 4
MIN_SHARE = 0.6
WINDOW_SECONDS = 1800.0
"""Maximum distance of their onsets."""


class RankGroup:
    """Groups of series that leak together. The series that represents a group stays the same while it leaks itself."""

    def __init__(self) -> None:
        self._representatives: dict[str, SeriesKey] = {}

    def verdicts(self, tracked_series: Collection[TrackedSeries]) -> dict[SeriesKey, Verdict | None]:
        """Return the verdicts that replace the series' own leak; None if the verdict of another series includes it."""
        leaking: defaultdict[str, list[TrackedSeries]] = defaultdict(list)
        for tracked in tracked_series:
            if tracked.leak is not None and tracked.process is not None and "leak" in tracked.verdicts:
                leaking[tracked.name].append(tracked)
        replacements: dict[SeriesKey, Verdict | None] = {}
        self._representatives = {
            name: representative for name, representative in self._representatives.items() if name in leaking
        }
        for name, alike in leaking.items():
            group = _together(alike) if len({tracked.uuid for tracked in alike}) >= MIN_DEVICES * MIN_SHARE else []
            peers = (
                [tracked for tracked in tracked_series if tracked.name == name and tracked.process is not None]
                if group
                else []
            )
            if len({tracked.uuid for tracked in peers}) < MIN_DEVICES or len(group) < MIN_SHARE * len(peers):
                self._representatives.pop(name, None)
                continue
            replacements.update((tracked.key, None) for tracked in group)
            representative = self._representative(name, group)
            replacements[representative.key] = _for_all(representative, group)
        return replacements

    def _representative(self, name: str, group: Collection[TrackedSeries]) -> TrackedSeries:
        known = self._representatives.get(name)
        representative = next((tracked for tracked in group if tracked.key == known), None)
        if representative is None:
            representative = max(group, key=lambda tracked: tracked.leak.growth if tracked.leak else 0.0)
            self._representatives[name] = representative.key
        return representative


def _together(alike: Collection[TrackedSeries]) -> list[TrackedSeries]:
    """Return the largest group whose onsets lie within one window; the earliest of such groups."""
    onsets = sorted((tracked.leak.onset, i) for i, tracked in enumerate(alike) if tracked.leak is not None)
    ordered = list(alike)
    best: list[TrackedSeries] = []
    for begin, _ in onsets:
        group = [ordered[i] for onset, i in onsets if begin <= onset <= begin + WINDOW_SECONDS]
        if len(group) > len(best):
            best = group
    return best


def _for_all(representative: TrackedSeries, group: Collection[TrackedSeries]) -> Verdict:
    """Return the representative's verdict, with the time, the fit and the text of the program that is the first to
    fill its device."""
    own = representative.verdicts["leak"]
    count, devices = len(group), len({tracked.uuid for tracked in group})
    evidence = dict(own.evidence) | {"processes": float(count), "devices": float(devices)}
    soonest = min((representative, *group), key=_seconds_left)
    first = soonest.verdicts["leak"]
    fit = first.fit
    if fit is not None and soonest is not representative:
        fit = replace(fit, device_uuid=soonest.uuid, pid=soonest.pid)
    return replace(
        own,
        evidence=tuple(evidence.items()),
        time_to_oom_seconds=first.time_to_oom_seconds,
        fit=fit,
        summary=messages.together(first.summary, count, devices),
    )


def _seconds_left(tracked: TrackedSeries) -> float:
    """Return the seconds until the leak has filled its device; infinity if they are unknown."""
    seconds = tracked.verdicts["leak"].time_to_oom_seconds
    return inf if seconds is None else seconds
