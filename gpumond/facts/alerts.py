"""States of alerts, and their form across a restart of the daemon.

After an outage of at most an hour a firing alert continues to fire, and a pending one continues with the time before
the outage, which itself does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpumond.facts.frame import Alert
from gpumond.facts.persisted import Heartbeat, KeptAlert
from gpumond.facts.process import ProcessKey
from gpumond.facts.rule import Labels


class Activity(NamedTuple):
    """State of one alert. ``*_elapsed`` are monotonic, so that no clock change fires or resolves.

    ``process`` is that of the alert, as one object: a tick compares thousands of them. ``cleared_elapsed``: the first
    evaluation without a breach, while ``keep_firing_for`` delays the resolution.
    """

    alert: Alert
    process: ProcessKey | None
    active_elapsed: float
    cleared_elapsed: float | None = None


Activities = Mapping[Labels, Activity]
"""The alerts of one rule by the labels of their subjects."""


def ended(alert: Alert, at: float, reason: str = "") -> Alert:
    """Return the alert as resolved. ``reason`` states that its subject has ended; empty if the subject still exists."""
    if reason:
        summary = dict(alert.annotations).get("summary", "")
        texts = {**dict(alert.annotations), "summary": f"{reason}; the alert was: {summary}" if summary else reason}
        alert = replace(alert, annotations=tuple(texts.items()))
    return replace(alert, phase="resolved", resolved_at=at)


def same_process(one: ProcessKey | None, other: ProcessKey | None) -> bool:
    """Return False if the two are known to be different processes, so that an alert on one is none on the other."""
    return one == other or one is None or other is None or one.may_be(other)


OUTAGE_TOLERANCE_SECONDS = 3600.0


def kept(activities: Mapping[str, Activities], began: float) -> Iterator[KeptAlert]:
    """Yield the alerts to be stored; ``began`` is the monotonic time at which elapsed time was 0."""
    for active in activities.values():
        for labels, activity in active.items():
            cleared = activity.cleared_elapsed
            yield KeptAlert(
                labels, activity.alert, began + activity.active_elapsed, None if cleared is None else began + cleared
            )


def resume(alerts: Iterable[KeptAlert], alive: Heartbeat | None, now: float) -> dict[str, dict[Labels, Activity]]:
    """Return the alerts as of the previous daemon's last activity, with elapsed time starting at 0 again."""
    if alive is None or now - alive.at > OUTAGE_TOLERANCE_SECONDS:
        return {}
    activities: dict[str, dict[Labels, Activity]] = {}
    for each in alerts:
        cleared = None if each.cleared_monotonic is None else min(0.0, each.cleared_monotonic - alive.monotonic)
        since = min(0.0, each.active_monotonic - alive.monotonic)
        activity = Activity(each.alert, each.alert.process, since, cleared)
        activities.setdefault(each.alert.rule, {})[each.subject] = activity
    return activities
