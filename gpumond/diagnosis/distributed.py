"""Programs that grow alike on many devices: one verdict for all of them. Pure.

The ranks of one training leak together, and replicas of one service grow together under load. That is one thing to
know, said once with how many it is; it is never left unsaid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from gpumond.diagnosis import messages
from gpumond.diagnosis.tracked_series import Key, TrackedSeries
from gpumond.model.frame import Verdict

LEAST_DEVICES = 4
LEAST_SHARE = 0.6
WINDOW_SECONDS = 1800.0
"""Their onsets lie within this time of each other."""


class RankGroup:
    """Who speaks for whom. The speaker stays the same while it leaks itself."""

    def __init__(self) -> None:
        self._speakers: dict[str, Key] = {}

    def verdicts(self, watches: Collection[TrackedSeries]) -> dict[Key, Verdict | None]:
        """What to say of a leak in place of the watch's own verdict; None: another speaks for it."""
        leaking: defaultdict[str, list[TrackedSeries]] = defaultdict(list)
        for watch in watches:
            if watch.leak is not None and watch.pid is not None and "leak" in watch.verdicts:
                leaking[watch.name].append(watch)
        instead: dict[Key, Verdict | None] = {}
        self._speakers = {name: speaker for name, speaker in self._speakers.items() if name in leaking}
        for name, alike in leaking.items():
            group = _together(alike) if len({watch.uuid for watch in alike}) >= LEAST_DEVICES * LEAST_SHARE else []
            peers = [watch for watch in watches if watch.name == name and watch.pid is not None] if group else []
            if len({watch.uuid for watch in peers}) < LEAST_DEVICES or len(group) < LEAST_SHARE * len(peers):
                self._speakers.pop(name, None)
                continue
            instead.update((watch.life, None) for watch in group)
            speaker = self._speaker(name, group)
            instead[speaker.life] = _for_all(speaker, group)
        return instead

    def _speaker(self, name: str, group: Collection[TrackedSeries]) -> TrackedSeries:
        known = self._speakers.get(name)
        speaker = next((watch for watch in group if watch.life == known), None)
        if speaker is None:
            speaker = max(group, key=lambda watch: watch.leak.growth if watch.leak else 0.0)
            self._speakers[name] = speaker.life
        return speaker


def _together(alike: Collection[TrackedSeries]) -> list[TrackedSeries]:
    """The largest group whose onsets lie within one window; the earliest of such groups."""
    onsets = sorted((watch.leak.onset, i) for i, watch in enumerate(alike) if watch.leak is not None)
    ordered = list(alike)
    best: list[TrackedSeries] = []
    for begin, _ in onsets:
        group = [ordered[i] for onset, i in onsets if begin <= onset <= begin + WINDOW_SECONDS]
        if len(group) > len(best):
            best = group
    return best


def _for_all(speaker: TrackedSeries, group: Collection[TrackedSeries]) -> Verdict:
    own = speaker.verdicts["leak"]
    count, devices = len(group), len({watch.uuid for watch in group})
    evidence = dict(own.evidence) | {"processes": float(count), "devices": float(devices)}
    said = [watch.verdicts["leak"].time_to_oom_seconds for watch in group]
    left = min((seconds for seconds in said if seconds is not None), default=None)
    return replace(
        own,
        evidence=tuple(evidence.items()),
        time_to_oom_seconds=left,
        summary=messages.together(own.summary, count, devices),
    )
