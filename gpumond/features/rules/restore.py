"""Alerts across a restart, with Prometheus' tolerance. No I/O.

After an outage of at most an hour a firing alert continues to fire, and a pending one continues with the time before
the outage, which itself does not count. An alert whose subject has not been observed since the start (its agent is not
connected, its driver is slow) is neither dropped nor resolved for ten minutes; one on a verdict for two hours, since
the verdict has to be found again (a slow leak took 70 minutes).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpumond.facts.persisted import Heartbeat, KeptAlert, Labels
from gpumond.facts.process import ProcessKey
from gpumond.features.rules.evaluation import Activities, Activity, same_process

OUTAGE_TOLERANCE_SECONDS = 3600.0
GRACE_SECONDS = 600.0
VERDICT_GRACE_SECONDS = 7200.0
"""Time for which a missing verdict does not resolve an alert after a start: a verdict needs a longer observation."""

Awaited = frozenset[tuple[str, Labels]]
"""Restored alerts whose subject has not been observed yet: rule and the subject's labels"""


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


def awaited(activities: Mapping[str, Activities]) -> Awaited:
    return frozenset((rule, labels) for rule, active in activities.items() for labels in active)


def hold(
    awaited: Awaited,
    before: Mapping[str, Activities],
    after: Mapping[str, Activities],
    present: Mapping[str, Mapping[Labels, ProcessKey | None]],
    on_verdicts: frozenset[str],
    elapsed: float,
) -> tuple[Mapping[str, Activities], Awaited]:
    """Return ``after`` with the awaited alerts unchanged, and the alerts that are still awaited.

    A subject that was ``present`` (by rule, each with its process) is no longer awaited; an alert of a rule
    ``on_verdicts`` is awaited until its verdict is active again, or its pid is found to be reused.
    """
    if not awaited or elapsed > max(GRACE_SECONDS, VERDICT_GRACE_SECONDS):
        return after, frozenset()

    def waits(rule: str, labels: Labels) -> bool:
        if labels not in present[rule]:
            return elapsed <= GRACE_SECONDS
        if not same_process(before[rule][labels].process, present[rule][labels]):
            return False
        activity = after[rule].get(labels)
        return rule in on_verdicts and (activity is None or activity.cleared_elapsed is not None)

    still = frozenset((rule, labels) for rule, labels in awaited if rule in after and waits(rule, labels))
    held = {rule: dict(active) for rule, active in after.items()}
    for rule, labels in still:
        held[rule][labels] = before[rule][labels]
    return held, still
