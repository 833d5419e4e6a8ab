"""Rules on snapshots: their alerts, previews, and alerts across a restart with Prometheus' tolerance. No I/O.

An alert whose subject has not been observed since the start (its agent is not connected, its driver is slow) is neither
dropped nor resolved for ten minutes, unless its process has ended; one on a verdict for two hours, since the verdict
has to be found again (a slow leak took 70 minutes).
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from gpumond.facts.alerts import (
    AGAIN_SINCE,
    ENDED_PREFIX,
    AlertState,
    AlertStates,
    Labels,
    Rule,
    RuleScope,
    as_past,
    as_resolved,
    same_process,
)
from gpumond.facts.errors import AmbiguousDevice, NoSuchDevice
from gpumond.facts.frame import Alert, Frame, Phase, Verdict, find_device_uuid
from gpumond.facts.messages import to_json
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import STARTING, DeviceReading, Snapshot
from gpumond.facts.units import clock_text
from gpumond.quantities import ending_sentence, subjects, unreadable_subjects
from gpumond.quantities.quantity import value_text
from gpumond.quantities.scope import (
    OWNER_LABELS,
    VALUES_WITHOUT_VERDICT,
    Row,
    RuleContext,
    Subjects,
    UnreadableSubjects,
    problem_verdicts,
)
from gpumond.quantities.window import RuleWindow, next_window
from gpumond.store.table import type_adapter
from gpumond.tick.ledger import make_ledger

GRACE_SECONDS = 600.0
VERDICT_GRACE_SECONDS = 7200.0
"""Time for which a missing verdict does not resolve an alert after a start: a verdict needs a longer observation."""

AwaitedAlerts = frozenset[tuple[str, Labels]]
"""Restored alerts whose subject has not been observed yet: rule and the subject's labels"""


def awaited_alerts(alert_states: Mapping[str, AlertStates], has_ended: Callable[[ProcessKey], bool]) -> AwaitedAlerts:
    """Return the restored alerts, except those on processes that ended while no daemon ran."""
    return frozenset(
        (rule, labels)
        for rule, active in alert_states.items()
        for labels, state in active.items()
        if state.process is None or not has_ended(state.process)
    )


def keep_awaited_alerts(
    awaited: AwaitedAlerts,
    before: Mapping[str, AlertStates],
    after: Mapping[str, AlertStates],
    present_by_rule: Mapping[str, Mapping[Labels, ProcessKey | None]],
    verdict_rules: frozenset[str],
    monotonic_now: float,
) -> tuple[Mapping[str, AlertStates], AwaitedAlerts]:
    """Return ``after`` with the awaited alerts unchanged, and the alerts that are still awaited.

    A subject in ``present_by_rule`` (each with its process) is no longer awaited; an alert of one of the
    ``verdict_rules`` is awaited until its verdict is active again, or its pid is found to be reused.
    """
    if not awaited or monotonic_now > max(GRACE_SECONDS, VERDICT_GRACE_SECONDS):
        return after, frozenset()

    def is_awaited(rule: str, labels: Labels) -> bool:
        if labels not in present_by_rule[rule]:
            return monotonic_now <= GRACE_SECONDS
        if not same_process(before[rule][labels].process, present_by_rule[rule][labels]):
            return False
        state = after[rule].get(labels)
        return rule in verdict_rules and (state is None or state.cleared_monotonic is not None)

    still_awaited = frozenset((rule, labels) for rule, labels in awaited if rule in after and is_awaited(rule, labels))
    merged = {rule: dict(active) for rule, active in after.items()}
    for rule, labels in still_awaited:
        merged[rule][labels] = before[rule][labels]
    return merged, still_awaited


def evaluate_rule(
    rule: Rule,
    subjects: Subjects[Row],
    before: AlertStates,
    unreadable: UnreadableSubjects,
    now: float,
    monotonic_now: float,
) -> AlertStates:
    """Return the rule's alerts after one evaluation."""
    after: dict[Labels, AlertState] = {}
    absent = dict(before)
    value_of, above = subjects.values[rule.value], rule.above
    below = -inf if rule.below is None else rule.below
    for row in subjects.rows:
        value = value_of(row)
        if not absent and (value is None or not (value < below if above is None else value > above)):
            continue  # nearly every subject of nearly every tick
        process = subjects.process(row)
        if process in unreadable.suspended:
            continue
        labels = subjects.labels(row)
        state = absent.pop(labels, None)
        if state is None and (value is None or not is_breached(rule, value, active=False)):
            continue
        if rule.match and not rule.concerns(dict(labels), subjects.programs(row)):
            continue
        if state is not None and not same_process(state.process, process):
            state = None  # the process of the alert has ended, and its pid is reused
        if value is not None:
            state = _next_state(rule, subjects, row, labels, process, value, state, now, monotonic_now)
        if state is not None:
            after[labels] = state
    for labels, state in absent.items():
        if unreadable.covers(dict(labels), state.process):
            after[labels] = state
        elif state.process in unreadable.connected and (
            cleared := _next_cleared_state(rule, state, now, monotonic_now)
        ):
            after[labels] = cleared
    return after


@dataclass(frozen=True, slots=True)
class RuleState:
    """State that one evaluation of all rules passes to the next. ``alert_states``: by the name of the rule."""

    alert_states: Mapping[str, AlertStates] = field(default_factory=dict)
    awaited: AwaitedAlerts = frozenset()


class EvaluatedAlerts(NamedTuple):
    """Alerts, and those that began or ceased to fire."""

    alerts: tuple[Alert, ...]
    raised: tuple[Alert, ...]
    resolved: tuple[Alert, ...]


def evaluate(
    state: RuleState, rules: Sequence[Rule], frame: Frame, window: RuleWindow
) -> tuple[RuleState, EvaluatedAlerts]:
    snapshot = frame.snapshot
    unreadable = unreadable_subjects(snapshot, window)
    context = RuleContext(snapshot, frame.ledger, window, problem_verdicts(frame.verdicts))
    scopes: dict[RuleScope, Subjects[Any]] = {
        scope: subjects(scope, context) for scope in {rule.scope for rule in rules}
    }
    now, monotonic_now = snapshot.taken_at, snapshot.elapsed_seconds
    alert_states: Mapping[str, AlertStates] = {
        rule.name: evaluate_rule(
            with_device_uuid(rule, snapshot.devices),
            scopes[rule.scope],
            state.alert_states.get(rule.name, {}),
            unreadable,
            now,
            monotonic_now,
        )
        for rule in rules
    }
    # After a restart, alerts whose subject has not been seen yet are neither dropped nor resolved.
    awaited = state.awaited
    if awaited:
        present = {scope: {each.labels(row): each.process(row) for row in each.rows} for scope, each in scopes.items()}
        subjects_by_rule = {rule.name: present[rule.scope] for rule in rules}
        verdict_rules = frozenset(rule.name for rule in rules if rule.value in VALUES_WITHOUT_VERDICT)
        alert_states, awaited = keep_awaited_alerts(
            awaited, state.alert_states, alert_states, subjects_by_rule, verdict_rules, monotonic_now
        )
    alerts = tuple(each.alert for active in alert_states.values() for each in active.values())
    raised = tuple(_newly_firing(state.alert_states, alert_states))
    resolved = tuple(_resolve(_newly_firing(alert_states, state.alert_states), rules, snapshot))
    return RuleState(alert_states, awaited), EvaluatedAlerts(alerts, raised, resolved)


def _newly_firing(before: Mapping[str, AlertStates], after: Mapping[str, AlertStates]) -> Iterator[Alert]:
    """Yield the alerts that fire in ``after`` and not in ``before``."""
    for rule, active in after.items():
        states_before = before.get(rule, {})
        for labels, state in active.items():
            alert = state.alert
            if alert.phase == "firing":
                previous = states_before.get(labels)
                if (
                    previous is None
                    or previous.alert.phase != "firing"
                    or previous.alert.labels != alert.labels
                    or not same_process(previous.process, state.process)
                ):
                    yield alert


def _resolve(alerts: Iterable[Alert], rules: Sequence[Rule], snapshot: Snapshot) -> Iterator[Alert]:
    """Yield the alerts as resolved. Their texts say why: the rule, the subject or the breach has ended."""
    scopes: dict[str, RuleScope] = {rule.name: rule.scope for rule in rules}
    for alert in alerts:
        scope = scopes.get(alert.rule)
        removed = f"the rule {alert.rule} was deleted or disabled"
        reason = removed if scope is None else ending_sentence(scope, alert, snapshot)
        yield as_resolved(alert if reason else _with_ended_breach(alert, snapshot.taken_at), snapshot.taken_at, reason)


def _with_ended_breach(alert: Alert, now: float) -> Alert:
    """Return the alert with a text that says that the breach has ended: since now, unless it says so already."""
    says_so = dict(alert.annotations).get("summary", "").startswith(ENDED_PREFIX)
    return alert if says_so or not alert.annotations else as_past(alert, f"{ENDED_PREFIX}{clock_text(now)}")


def with_device_uuid(rule: Rule, devices: Sequence[DeviceReading]) -> Rule:
    """Return the rule with the device that it matches as a UUID. An unknown or ambiguous name matches nothing."""
    name = dict(rule.match).get("device")
    if name is None:
        return rule
    try:
        uuid = find_device_uuid(name, devices)
    except (NoSuchDevice, AmbiguousDevice):
        uuid = ""
    others = (each for each in rule.match if each[0] != "device")
    return replace(rule, match=(*others, ("uuid", uuid)))


def is_breached(rule: Rule, value: float, active: bool) -> bool:
    """Return True if ``value`` is beyond the threshold, or, while active, not yet back past ``clear``."""
    if rule.above is not None:
        return value > (rule.clear if active and rule.clear is not None else rule.above)
    if rule.below is not None:
        return value < (rule.clear if active and rule.clear is not None else rule.below)
    return False


def _next_state(
    rule: Rule,
    subjects: Subjects[Row],
    row: Row,
    labels: Labels,
    process: ProcessKey | None,
    value: float,
    before: AlertState | None,
    now: float,
    monotonic_now: float,
) -> AlertState | None:
    if not is_breached(rule, value, active=before is not None and before.cleared_monotonic is None):
        return _next_cleared_state(rule, before, now, monotonic_now) if before else None
    owner = _owner_labels_of_alert(before.alert) if before else _owner_labels(subjects, row, process)
    alert_labels = _alert_labels(rule.name, (*labels, *owner), rule.labels)
    if before is not None and before.alert.labels != alert_labels:
        before = None  # the rule has other labels now: another alert
    returned_at = None if before is None else before.returned_at if before.cleared_monotonic is None else now
    active_at, since = (before.alert.active_at, before.active_monotonic) if before else (now, monotonic_now)
    if before and before.process and process and process.start_ticks is None:
        process = before.process  # /proc no longer has the pid
    phase: Phase = "firing" if monotonic_now - since >= rule.for_seconds else "pending"
    fired_at = None if phase == "pending" else (before and before.alert.fired_at) or now
    alert = Alert(
        rule=rule.name,
        phase=phase,
        labels=alert_labels,
        annotations=_annotations(rule, subjects, row, value, returned_at),
        value=value,
        active_at=active_at,
        fired_at=fired_at,
        pid=process.pid if process else None,
        start_ticks=process.start_ticks if process else None,
    )
    return AlertState(alert, process, since, returned_at=returned_at)


def _next_cleared_state(rule: Rule, before: AlertState, now: float, monotonic_now: float) -> AlertState | None:
    """Keep the alert for ``keep_firing_for``, from the first evaluation without a breach, as Prometheus does.

    Its text then says so: it's that of the last breach.
    """
    if before.alert.phase == "pending" or not rule.keep_firing_for_seconds:
        return None
    if before.cleared_monotonic is None:
        return before._replace(alert=_with_ended_breach(before.alert, now), cleared_monotonic=monotonic_now)
    return before if monotonic_now - before.cleared_monotonic < rule.keep_firing_for_seconds else None


def _owner_labels(subjects: Subjects[Row], row: Row, process: ProcessKey | None) -> Labels:
    """Return the labels by which silences and routes find the alerts of a process after its restart."""
    if process is None:
        return ()
    workload = next(iter(subjects.programs(row)), "")
    return (*((("workload", workload),) if workload else ()), *subjects.owner(process))


def _owner_labels_of_alert(alert: Alert) -> Labels:
    """Return those labels of an active alert: what becomes known or unknown later doesn't make it another alert."""
    return tuple(label for label in alert.labels if label[0] in ("workload", *OWNER_LABELS))


@lru_cache(16_384)
def _alert_labels(rule: str, labels: Labels, rule_labels: Labels) -> Labels:
    return tuple(sorted({"alertname": rule, **dict(labels), **dict(rule_labels)}.items()))


def _annotations(rule: Rule, subjects: Subjects[Row], row: Row, value: float, returned_at: float | None) -> Labels:
    if not rule.annotations:
        return ()
    threshold, unit = rule.above if rule.above is not None else rule.below, subjects.units[rule.value]
    rounded = round(value, 2) if unit == "ratio" else value  # 57%, as elsewhere
    words = {"value": value_text(unit, rounded), "threshold": value_text(unit, threshold or 0.0)}

    def text(match: re.Match[str]) -> str:
        text_of = subjects.texts.get(match[1])
        return words.get(match[1]) or (text_of(row) if text_of else match[0])

    again = "" if returned_at is None else f"{AGAIN_SINCE}{clock_text(returned_at)}"
    return tuple(
        (name, PLACEHOLDER.sub(text, template) + (again if name == "summary" else ""))
        for name, template in rule.annotations
    )


PLACEHOLDER = re.compile(r"\{(\w+)\}")


PREVIEW_SECONDS = 3600.0
MOMENT_INTERVAL_SECONDS = 30.0
MAX_PREVIEW_ALERTS = 1000
"""Maximum number of alerts of a preview: a rule that many subjects breach every other moment would have hundreds of
thousands.
"""
MAX_PREVIEW_BYTES = 16 << 20
"""Maximum size of all packed moments: 120 moments of 1000 processes each take a third of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Alerts that would have ``fired`` between the two times, oldest first; ``resolved_at`` is None if they still fire.

    One snapshot per ``resolution_seconds`` was evaluated, so shorter breaches aren't found. Nothing is known about the
    time before ``from_at``: the daemon's start, if that is less than an hour ago, or the oldest snapshot that is kept.
    ``fired`` has at most ``MAX_PREVIEW_ALERTS`` alerts, the newest; ``omitted`` is the number of the others.
    """

    from_at: float | None
    to_at: float | None
    resolution_seconds: float
    snapshots: int
    omitted: int
    fired: tuple[Alert, ...]


def pack_moment(snapshot: Snapshot, verdicts: tuple[Verdict, ...]) -> bytes:
    """Pack a moment as compressed JSON: an hour of 1000 processes takes 5 MiB, as objects 200 MiB."""
    return zlib.compress(to_json(snapshot) + b"\n" + to_json(verdicts), 1)


def unpack_moment(packed: bytes) -> tuple[Snapshot, tuple[Verdict, ...]]:
    snapshot, verdicts = zlib.decompress(packed).split(b"\n")
    return type_adapter(Snapshot).validate_json(snapshot), type_adapter(tuple[Verdict, ...]).validate_json(verdicts)


class PreviewMoments:
    """Packed moments of the last hour, fewer if they are large."""

    def __init__(self, max_bytes: int = MAX_PREVIEW_BYTES) -> None:
        self._moments: deque[bytes] = deque(maxlen=int(PREVIEW_SECONDS / MOMENT_INTERVAL_SECONDS))
        self._max_bytes, self._added_at = max_bytes, -MOMENT_INTERVAL_SECONDS

    def add(self, frame: Frame) -> None:
        """Keep a frame if it is due. Frames from before the first reading are left out, because they have no values."""
        now = frame.snapshot.elapsed_seconds
        if now - self._added_at < MOMENT_INTERVAL_SECONDS or frame.snapshot.source.reason == STARTING:
            return
        self._added_at = now
        self._moments.append(pack_moment(frame.snapshot, frame.verdicts))
        while len(self._moments) > 1 and sum(map(len, self._moments)) > self._max_bytes:
            self._moments.popleft()

    def moments(self) -> tuple[bytes, ...]:
        return tuple(self._moments)


def preview(rule: Rule, moments: Iterable[bytes]) -> Preview:
    """Evaluate the rule on packed ``moments``, oldest first."""
    state, window, times = RuleState(), RuleWindow(), list[float]()
    firing: dict[tuple[tuple[str, str], ...], Alert] = {}
    resolved, resolved_count = deque[Alert](maxlen=MAX_PREVIEW_ALERTS), 0
    frame: Frame | None = None
    for moment in moments:
        snapshot, verdicts = unpack_moment(moment)
        window = next_window(window, snapshot)
        frame = Frame(snapshot, make_ledger(snapshot, frame), verdicts)
        state, evaluated = evaluate(state, (rule,), frame, window)
        for alert in evaluated.resolved:
            firing.pop(alert.labels, None)
            resolved.append(alert)
        resolved_count += len(evaluated.resolved)
        firing.update((alert.labels, alert) for alert in evaluated.raised)
        times.append(snapshot.taken_at)
    fired = sorted([*resolved, *firing.values()], key=lambda alert: alert.active_at)[-MAX_PREVIEW_ALERTS:]
    omitted = resolved_count + len(firing) - len(fired)
    return Preview(
        from_at=times[0] if times else None,
        to_at=times[-1] if times else None,
        resolution_seconds=MOMENT_INTERVAL_SECONDS,
        snapshots=len(times),
        omitted=omitted,
        fired=tuple(fired),
    )
