"""Alerts across a restart, with Prometheus' tolerance. No I/O.

An alert whose subject has not been observed since the start (its agent is not
connected, its driver is slow) is neither dropped nor resolved for ten minutes; one on a verdict for two hours, since
the verdict has to be found again (a slow leak took 70 minutes).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.facts.alerts import Activities, same_process
from gpumond.facts.process import ProcessKey
from gpumond.facts.rule import Labels

GRACE_SECONDS = 600.0
VERDICT_GRACE_SECONDS = 7200.0
"""Time for which a missing verdict does not resolve an alert after a start: a verdict needs a longer observation."""

Awaited = frozenset[tuple[str, Labels]]
"""Restored alerts whose subject has not been observed yet: rule and the subject's labels"""


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
