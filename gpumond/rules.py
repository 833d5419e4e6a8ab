"""Rules and their alerts: Prometheus' semantics for pending, firing, `for` and `keep_firing_for`. Pure.

A rule compares one value of each subject of its scope with a level. An alert that is active stays
active until the value passes the `clear` level; a value that is unknown changes nothing, since
absence is not recovery.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from gpumond.model import Alert, Phase

Scope = Literal["device", "process", "pool", "workload", "daemon"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One level (``above`` or ``below``), how long it must hold, and whom it concerns (``match``, globs on labels)."""

    name: str
    scope: Scope
    value: str
    above: float | None = None
    below: float | None = None
    clear: float | None = None
    for_seconds: float = 0.0
    keep_firing_for_seconds: float = 0.0
    match: Labels = ()
    labels: Labels = ()
    annotations: Labels = ()

    def breached(self, value: float, active: bool) -> bool:
        """Whether ``value`` is beyond the level, or, while active, not yet back past ``clear``."""
        if self.above is not None:
            return value > (self.clear if active and self.clear is not None else self.above)
        if self.below is not None:
            return value < (self.clear if active and self.clear is not None else self.below)
        return False

    def concerns(self, labels: Mapping[str, str]) -> bool:
        return all(fnmatchcase(labels.get(name, ""), pattern) for name, pattern in self.match)


class Subject(NamedTuple):
    """What a rule looks at. ``values`` holds None for what is unknown now; ``texts`` fill annotations."""

    labels: Labels
    values: Mapping[str, float | None]
    texts: Callable[[], Mapping[str, str]]


class Activity(NamedTuple):
    """The memory of one alert. ``*_elapsed`` are monotonic, so that no clock jump fires or resolves."""

    alert: Alert
    active_elapsed: float
    breached_elapsed: float


Activities = Mapping[Labels, Activity]
"""The alerts of one rule by the labels of their subjects."""


def step(
    rule: Rule, subjects: Iterable[Subject], before: Activities, hidden: frozenset[str], now: float, elapsed: float
) -> Activities:
    """The rule's alerts after one evaluation.

    ``hidden`` holds the UUIDs of devices that cannot be seen now: alerts about them, or about
    what runs on them, are kept as they were.
    """
    after: dict[Labels, Activity] = {}
    for subject in subjects:
        value = subject.values.get(rule.value)
        activity = before.get(subject.labels) if before else None
        if activity is None and (value is None or not rule.breached(value, active=False)):
            continue  # nearly every subject of nearly every tick
        if rule.match and not rule.concerns(dict(subject.labels)):
            continue
        if value is not None:
            activity = _advance(rule, subject, value, activity, now, elapsed)
        if activity is not None:
            after[subject.labels] = activity
    for labels, activity in before.items():
        if labels not in after and dict(labels).get("uuid") in hidden:
            after[labels] = activity
    return after


def _advance(
    rule: Rule, subject: Subject, value: float, before: Activity | None, now: float, elapsed: float
) -> Activity | None:
    if not rule.breached(value, active=before is not None):
        if before is None or before.alert.phase == "pending":
            return None
        keep = elapsed - before.breached_elapsed < rule.keep_firing_for_seconds
        return before if keep else None
    active_at, since = (before.alert.active_at, before.active_elapsed) if before else (now, elapsed)
    phase: Phase = "firing" if elapsed - since >= rule.for_seconds else "pending"
    if before and before.alert.phase == phase and before.alert.value == value:
        return Activity(before.alert, since, elapsed)
    fired_at = None if phase == "pending" else (before and before.alert.fired_at) or now
    identity = before.alert.labels if before else _identity(rule, subject)
    alert = Alert(rule.name, phase, identity, _annotations(rule, subject), value, active_at, fired_at)
    return Activity(alert, since, elapsed)


def _identity(rule: Rule, subject: Subject) -> Labels:
    return tuple(sorted({"alertname": rule.name, **dict(subject.labels), **dict(rule.labels)}.items()))


def _annotations(rule: Rule, subject: Subject) -> Labels:
    if not rule.annotations:
        return ()
    texts = subject.texts()

    def text(match: re.Match[str]) -> str:
        return texts.get(match[1], match[0])

    return tuple((name, re.sub(r"\{(\w+)\}", text, template)) for name, template in rule.annotations)


BUILT_IN: tuple[Rule, ...] = (
    Rule(
        "device-nearly-full",
        "device",
        "used_ratio",
        above=0.80,
        clear=0.75,
        for_seconds=60,
        labels=(("severity", "warning"),),
        annotations=(("summary", "{gpu} {name}: {used} of {size} used; a flush would return {reclaimable}"),),
    ),
    Rule(
        "reclaimable-waste",
        "device",
        "reclaimable_ratio",
        above=0.30,
        clear=0.25,
        for_seconds=300,
        labels=(("severity", "info"),),
        annotations=(("summary", "{gpu} {name}: {reclaimable} of {size} are cache that a flush would return"),),
    ),
    Rule(
        "orphan-memory",
        "device",
        "unclaimed_ratio",
        above=0.05,
        for_seconds=300,
        labels=(("severity", "warning"),),
        annotations=(("summary", "{gpu} {name}: {unclaimed} are used and no visible process owns them"),),
    ),
    Rule(
        "device-lost",
        "device",
        "up",
        below=1,
        for_seconds=10,
        labels=(("severity", "critical"),),
        annotations=(("summary", "{gpu} {name} does not answer its driver"),),
    ),
    Rule(
        "driver-unresponsive",
        "daemon",
        "driver_responsive",
        below=1,
        labels=(("severity", "critical"),),
        annotations=(("summary", "a driver call does not return: {reason}"),),
    ),
    Rule(
        "driver-down",
        "daemon",
        "driver_up",
        below=1,
        for_seconds=60,
        labels=(("severity", "critical"),),
        annotations=(("summary", "no device can be read: {reason}"),),
    ),
)
"""On by default; a rule of the same name in the configuration replaces one."""
