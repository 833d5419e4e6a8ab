"""States of alerts and notifications, and their form across a restart of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from gpumond.facts.frame import Alert
from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP
from gpumond.facts.program import ProcessKey

RuleScope = Literal["device", "process", "pool", "workload", "engine", "daemon"]


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A flush of the alert's subject when it fires, with its limits; ``workloads`` are globs.

    ``dry_run`` plans and notifies, and flushes nothing. ``only_idle_for_seconds``: serving engines are flushed once
    they have had no request for so long. ``request_end``: programs are asked to end after the flush. ``suspend``: those
    that allow it are suspended after the flush.
    """

    min_reclaimable_bytes: int = 0
    steps: tuple[str, ...] = DEFAULT_STEPS
    cooldown_seconds: float = 600.0
    max_per_hour: int = 6
    workloads: tuple[str, ...] = ("*",)
    dry_run: bool = False
    only_idle_for_seconds: float = 0.0
    request_end: bool = False
    suspend: bool = False

    @property
    def program_steps(self) -> tuple[str, ...]:
        """The steps without that of serving engines."""
        return tuple(step for step in self.steps if step != ENGINE_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One threshold (``above`` or ``below``), how long it must be exceeded, and its subjects (``match``, globs on
    labels).

    ``receivers`` are names from the configuration; none means all.
    """

    name: str
    scope: RuleScope
    value: str
    above: float | None = None
    below: float | None = None
    clear: float | None = None
    for_seconds: float = 0.0
    keep_firing_for_seconds: float = 0.0
    match: Labels = ()
    labels: Labels = ()
    annotations: Labels = ()
    receivers: tuple[str, ...] = ()
    action: Action | None = None

    def concerns(self, labels: Mapping[str, str], programs: Sequence[str]) -> bool:
        for name, pattern in self.match:
            texts = programs if name == "workload" and name not in labels else (labels.get(name, ""),)
            if not any(fnmatchcase(text, pattern) for text in texts):
                return False
        return True


Overrides = Mapping[str, Mapping[str, Any]]
"""The replaced fields of rules, by the names of rules and fields."""


def overridable_fields(rule: Rule) -> dict[str, Any]:
    """Return the rule's own values of the fields that can be replaced."""
    threshold = rule.below if rule.above is None else rule.above
    return {
        "threshold": float(threshold or 0),
        "for": float(rule.for_seconds),
        "severity": dict(rule.labels).get("severity", ""),
        "enabled": True,
    }


def with_overrides(rule: Rule, fields: Mapping[str, Any]) -> Rule:
    """Return the rule with other values of ``threshold``, ``for`` and ``severity``.

    The threshold of ``clear`` keeps its ratio to the threshold; a negative threshold is also that of ``clear``.
    """
    changes: dict[str, Any] = {}
    if "threshold" in fields:
        threshold, threshold_before = fields["threshold"], overridable_fields(rule)["threshold"]
        side, bound = ("below", max) if rule.above is None else ("above", min)
        changes[side] = threshold
        if rule.clear is not None and threshold_before:
            changes["clear"] = bound(rule.clear * (threshold / threshold_before), threshold)
    if "for" in fields:
        changes["for_seconds"] = fields["for"]
    if "severity" in fields:
        changes["labels"] = tuple({**dict(rule.labels), "severity": fields["severity"]}.items())
    return replace(rule, **changes)


NotificationKind = Literal["raised", "resolved"]


@dataclass(frozen=True, slots=True)
class StoredAlert:
    """One alert and the labels of its subject. ``*_monotonic`` are times of the clock of the daemon that stored it."""

    subject: Labels
    alert: Alert
    active_monotonic: float
    cleared_monotonic: float | None = None


@dataclass(frozen=True, slots=True)
class ClockTimes:
    """One moment: Unix seconds, and seconds of the monotonic clock of one daemon."""

    at: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification for one receiver. ``seq`` increases within a receiver."""

    receiver: str
    seq: int
    kind: NotificationKind
    alert: Alert


class AlertState(NamedTuple):
    """State of one alert. ``*_monotonic``: monotonic times, so no clock change fires or resolves.

    ``process`` is that of the alert, as one object: a tick compares thousands of them. ``cleared_monotonic``: the first
    evaluation without a breach, while ``keep_firing_for`` delays the resolution. ``returned_at``: when a
    breach followed.
    """

    alert: Alert
    process: ProcessKey | None
    active_monotonic: float
    cleared_monotonic: float | None = None
    returned_at: float | None = None


AlertStates = Mapping[Labels, AlertState]
"""The alerts of one rule by the labels of their subjects."""


ENDED_PREFIX = "ended at "
"""The start of an alert's text once what it says is over, while its subject still exists."""
ALERT_WAS = "; the alert was: "
AGAIN_SINCE = "; again since "
"""What precedes the time at the end of an alert's text if the breach has ended and come back."""


def as_past(alert: Alert, reason: str) -> Alert:
    """Return the alert with the reason why what it says is over, and without its next step, which is pointless now."""
    summary = dict(alert.annotations).get("summary", "").rpartition(ALERT_WAS)[2]
    texts = {**dict(alert.annotations), "summary": f"{reason}{ALERT_WAS}{summary}" if summary else reason}
    texts.pop("description", None)
    return replace(alert, annotations=tuple(texts.items()))


def as_resolved(alert: Alert, at: float, reason: str = "") -> Alert:
    """Return the alert as resolved. ``reason`` states that its subject or rule has ended; empty if both still exist."""
    return replace(as_past(alert, reason) if reason else alert, phase="resolved", resolved_at=at)


def same_process(one: ProcessKey | None, other: ProcessKey | None) -> bool:
    """Return False if the two are known to be different processes, so an alert on one is none on the other."""
    return one == other or one is None or other is None or one.may_be(other)


OUTAGE_TOLERANCE_SECONDS = 3600.0


def to_stored(states_by_rule: Mapping[str, AlertStates], started_monotonic: float) -> Iterator[StoredAlert]:
    """Yield the alerts to be stored; ``started_monotonic`` is the monotonic time at which elapsed time was 0."""
    for states in states_by_rule.values():
        for labels, state in states.items():
            cleared = state.cleared_monotonic
            yield StoredAlert(
                labels,
                state.alert,
                started_monotonic + state.active_monotonic,
                None if cleared is None else started_monotonic + cleared,
            )


def from_stored(
    alerts: Iterable[StoredAlert], last_activity: ClockTimes | None, now: float
) -> dict[str, dict[Labels, AlertState]]:
    """Return the alerts as of the previous daemon's last activity, with elapsed time starting at 0 again."""
    if last_activity is None or now - last_activity.at > OUTAGE_TOLERANCE_SECONDS:
        return {}
    states: dict[str, dict[Labels, AlertState]] = {}
    for each in alerts:
        cleared = None if each.cleared_monotonic is None else min(0.0, each.cleared_monotonic - last_activity.monotonic)
        since = min(0.0, each.active_monotonic - last_activity.monotonic)
        state = AlertState(each.alert, each.alert.process, since, cleared)
        states.setdefault(each.alert.rule, {})[each.subject] = state
    return states
