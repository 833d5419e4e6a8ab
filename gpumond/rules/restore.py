"""Alerts over a restart, with Prometheus' tolerance. Pure.

After an outage of at most an hour what fired fires on, and what was pending has been so for as long as
before the outage, which itself does not count. An alert whose subject has not been seen yet since the
start (its agent has not called, its driver is slow) is neither lost nor resolved for ten minutes; one on
a verdict for two hours, since that has to be found again (a quiet leak took 70 minutes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpumond.model.persisted import Heartbeat, KeptAlert, Labels
from gpumond.rules import Activities, Activity

OUTAGE_TOLERANCE_SECONDS = 3600.0
GRACE_SECONDS = 600.0
JUDGED_SECONDS = 7200.0
"""A verdict needs a look of some length: that it does not stand so soon after a start is no reason to resolve."""

Awaited = frozenset[tuple[str, Labels]]
"""Resumed alerts whose subject has not been seen yet: rule and the subject's labels."""


def kept(activities: Mapping[str, Activities], began: float) -> Iterator[KeptAlert]:
    """What to keep of the alerts; ``began`` is the monotonic time at which elapsed time was 0."""
    for active in activities.values():
        for labels, activity in active.items():
            cleared = activity.cleared_elapsed
            yield KeptAlert(
                labels, activity.alert, began + activity.active_elapsed, None if cleared is None else began + cleared
            )


def resume(alerts: Iterable[KeptAlert], alive: Heartbeat | None, now: float) -> dict[str, dict[Labels, Activity]]:
    """The alerts as the daemon before had them when it was last alive, with elapsed time starting at 0 again."""
    if alive is None or now - alive.at > OUTAGE_TOLERANCE_SECONDS:
        return {}
    activities: dict[str, dict[Labels, Activity]] = {}
    for each in alerts:
        cleared = None if each.cleared_monotonic is None else min(0.0, each.cleared_monotonic - alive.monotonic)
        activity = Activity(each.alert, min(0.0, each.active_monotonic - alive.monotonic), cleared)
        activities.setdefault(each.alert.rule, {})[each.subject] = activity
    return activities


def awaited(activities: Mapping[str, Activities]) -> Awaited:
    return frozenset((rule, labels) for rule, active in activities.items() for labels in active)


def hold(
    awaited: Awaited,
    before: Mapping[str, Activities],
    after: Mapping[str, Activities],
    seen: Mapping[str, frozenset[Labels]],
    on_verdicts: frozenset[str],
    elapsed: float,
) -> tuple[Mapping[str, Activities], Awaited]:
    """``after`` with the awaited alerts as they were before. Whoever was ``seen`` (by rule) is awaited no longer; an
    alert of a rule ``on_verdicts`` until its verdict stands again."""
    if not awaited or elapsed > max(GRACE_SECONDS, JUDGED_SECONDS):
        return after, frozenset()

    def waits(rule: str, labels: Labels) -> bool:
        if labels not in seen[rule]:
            return elapsed <= GRACE_SECONDS
        activity = after[rule].get(labels)
        return rule in on_verdicts and (activity is None or activity.cleared_elapsed is not None)

    still = frozenset((rule, labels) for rule, labels in awaited if rule in after and waits(rule, labels))
    held = {rule: dict(active) for rule, active in after.items()}
    for rule, labels in still:
        held[rule][labels] = before[rule][labels]
    return held, still
