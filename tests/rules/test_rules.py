from __future__ import annotations

from dataclasses import replace

import pytest

from gpumond.facts.alerts import AlertStates, Rule, overridable_fields, with_overrides
from gpumond.facts.frame import Alert
from gpumond.facts.program import ProcessKey
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.evaluation import evaluate_rule
from gpumond.features.rules.settings import OverrideConfig, RuleConfig, rule_body
from gpumond.quantities.scope import UnreadableSubjects
from tests.rules.rows import Row, of

LABELS = (("gpu", "0"), ("uuid", "GPU-a"))
FULL, NONE = of("used_ratio", Row(LABELS, 0.9)), of("used_ratio")


def run(rule: Rule, values: list[float | None], seconds: float = 1.0) -> list[str | None]:
    """The phase after each evaluation."""
    phases: list[str | None] = []
    alert_states: AlertStates = {}
    for tick, value in enumerate(values):
        now = tick * seconds
        alert_states = evaluate_rule(
            rule, of("used_ratio", Row(LABELS, value)), alert_states, UnreadableSubjects(), 1e6 + now, now
        )
        phases.append(alert_states[LABELS].alert.phase if alert_states else None)
    return phases


def make_rule(**fields: float) -> Rule:
    return Rule(name="r", scope="device", value="used_ratio", **({"above": 0.8} | fields))  # type: ignore[arg-type]


def test_rule_without_for_fires_at_once():
    assert run(make_rule(), [0.7, 0.9, 0.8]) == [None, "firing", None]


def test_for_counts_from_the_first_breach_and_restarts_after_a_gap():
    rule = make_rule(for_seconds=2)
    assert run(rule, [0.9, 0.9, 0.9, 0.9]) == ["pending", "pending", "firing", "firing"]
    assert run(rule, [0.9, 0.9, 0.1, 0.9]) == ["pending", "pending", None, "pending"]


def test_keep_firing_for_counts_from_the_first_evaluation_without_a_breach():
    rule = make_rule(keep_firing_for_seconds=2)
    assert run(rule, [0.9, 0.9, 0.1, 0.1, 0.1]) == ["firing", "firing", "firing", "firing", None]


def test_ended_subject_resolves_at_once_and_a_hidden_one_does_not():
    rule = make_rule(keep_firing_for_seconds=300)
    firing = evaluate_rule(rule, FULL, {}, UnreadableSubjects(), 0, 0)
    assert evaluate_rule(rule, NONE, firing, UnreadableSubjects(devices=frozenset({"GPU-a"})), 9, 9) == firing
    assert evaluate_rule(rule, NONE, firing, UnreadableSubjects(), 1, 1) == {}


def test_keep_firing_for_holds_for_a_connected_process_that_the_driver_no_longer_lists():
    rule, labels = make_rule(keep_firing_for_seconds=2), (("pid", "10"), ("uuid", "GPU-a"))
    firing = evaluate_rule(
        rule, of("used_ratio", Row(labels, 0.9, process=ProcessKey(10, 100))), {}, UnreadableSubjects(), 0, 0
    )
    connected = UnreadableSubjects(connected={ProcessKey(10, 100)})
    kept = evaluate_rule(rule, NONE, firing, connected, 1, 1)
    assert (len(kept), len(evaluate_rule(rule, NONE, kept, connected, 3, 3))) == (1, 0)
    assert not evaluate_rule(rule, NONE, firing, UnreadableSubjects(connected={ProcessKey(10, 101)}), 1, 1)


def test_kept_alert_says_since_when_it_is_over_and_states_the_values_of_its_last_breach():
    rule = replace(make_rule(keep_firing_for_seconds=9), annotations=(("summary", "{value}, {live} live now"),))
    alert_states: AlertStates = {}
    for at, (value, live) in enumerate(((0.9, "2 GiB"), (0.5, "1 GiB"), (0.5, "1 GiB"))):
        row = Row(LABELS, value, texts={"live": live})
        alert_states = evaluate_rule(
            rule, of("used_ratio", row, unit="ratio"), alert_states, UnreadableSubjects(), at, at
        )
    (activity,) = alert_states.values()
    assert activity.cleared_monotonic == 1
    over = "ended at 00:00:01 UTC; the alert was: 90%, 2 GiB live now"
    assert activity.alert.annotations == (("summary", over),)
    for at in (3, 4):
        row = Row(LABELS, 0.9, texts={"live": "1 GiB"})
        alert_states = evaluate_rule(
            rule, of("used_ratio", row, unit="ratio"), alert_states, UnreadableSubjects(), at, at
        )
    (activity,) = alert_states.values()
    again = "; again since 00:00:03 UTC"
    assert activity.alert.annotations == (("summary", f"90%, 1 GiB live now{again}"),)
    assert (activity.alert.active_at, activity.cleared_monotonic) == (0, None)


@pytest.mark.parametrize("start", [100, None])
def test_alert_of_a_process_without_a_known_start_continues_with_its_pid(start: int | None):
    rule, labels = make_rule(for_seconds=2), (("pid", "10"), ("uuid", "GPU-a"))
    alert_states: AlertStates = {}
    for at, known in enumerate((start, None, start, start)):
        row = Row(labels, 0.9, process=ProcessKey(10, known))
        alert_states = evaluate_rule(rule, of("used_ratio", row), alert_states, UnreadableSubjects(), at, at)
    (activity,) = alert_states.values()
    assert (activity.alert.phase, activity.alert.process) == ("firing", ProcessKey(10, start))


@pytest.mark.parametrize("between", [None, 100])
def test_alert_begins_again_for_another_process_with_the_same_pid(between: int | None):
    rule, labels = make_rule(for_seconds=2), (("pid", "10"), ("uuid", "GPU-a"))
    alert_states: AlertStates = {}
    for at, start in enumerate((100, 100, 100, between, 101)):
        row = Row(labels, 0.9, process=ProcessKey(10, start))
        alert_states = evaluate_rule(rule, of("used_ratio", row), alert_states, UnreadableSubjects(), at, at)
    (activity,) = alert_states.values()
    assert (activity.alert.phase, activity.alert.active_at) == ("pending", 4)


def test_longer_for_makes_a_firing_alert_pending_again():
    firing = evaluate_rule(make_rule(), FULL, {}, UnreadableSubjects(), 0, 0)
    (pending,) = evaluate_rule(make_rule(for_seconds=60), FULL, firing, UnreadableSubjects(), 1, 1).values()
    assert (pending.alert.phase, pending.alert.fired_at) == ("pending", None)


def test_changed_labels_of_a_rule_make_another_alert():
    before = evaluate_rule(make_rule(), FULL, {}, UnreadableSubjects(), 0, 0)
    (after,) = evaluate_rule(
        replace(make_rule(), labels=(("team", "a"),)), FULL, before, UnreadableSubjects(), 9, 9
    ).values()
    assert (dict(after.alert.labels)["team"], after.alert.active_at) == ("a", 9)


def test_alert_continues_until_the_clear_level():
    rule = make_rule(clear=0.6)
    assert run(rule, [0.7, 0.9, 0.7, 0.6, 0.7]) == [None, "firing", "firing", None, None]


def test_below_works_like_above():
    rule = Rule(name="r", scope="device", value="used_ratio", below=0.2, clear=0.4)
    assert run(rule, [0.3, 0.1, 0.3, 0.4]) == [None, "firing", "firing", None]


def test_unknown_value_neither_fires_nor_resolves():
    assert run(make_rule(for_seconds=2), [None, 0.9, None, 0.9, None]) == [
        None,
        "pending",
        "pending",
        "firing",
        "firing",
    ]


def test_match_is_a_glob_on_labels():
    rule = Rule(name="r", scope="workload", value="used_ratio", above=0.5, match=(("workload", "train-*"),))
    rows = [Row((("workload", name),), 0.9) for name in ("train-1", "serve")]
    assert list(evaluate_rule(rule, of("used_ratio", *rows), {}, UnreadableSubjects(), 0, 0)) == [
        (("workload", "train-1"),)
    ]


def test_device_matches_by_its_programs():
    rule = Rule(name="r", scope="device", value="used_ratio", above=0.5, match=(("workload", "train-*"),))
    rows = [
        Row((("uuid", uuid),), 0.9, programs=programs)
        for uuid, programs in (("GPU-a", ("serve", "train-1")), ("GPU-b", ("serve",)))
    ]
    assert list(evaluate_rule(rule, of("used_ratio", *rows), {}, UnreadableSubjects(), 0, 0)) == [(("uuid", "GPU-a"),)]


def test_alert_has_its_identity_and_filled_annotations():
    rule = Rule(
        name="full",
        scope="device",
        value="used_ratio",
        above=0.5,
        labels=(("severity", "warning"),),
        annotations=(("summary", "{gpu}: {used} used, {value} is above {threshold}, {what}"),),
    )
    full = of("used_ratio", Row(LABELS, 0.9, {"gpu": "0", "used": "9 GiB"}), unit="ratio")
    alert: Alert = evaluate_rule(rule, full, {}, UnreadableSubjects(), 5.0, 0)[LABELS].alert
    assert dict(alert.labels) == {"alertname": "full", "gpu": "0", "severity": "warning", "uuid": "GPU-a"}
    assert dict(alert.annotations) == {"summary": "0: 9 GiB used, 90% is above 50%, {what}"}
    assert (alert.active_at, alert.fired_at, alert.value) == (5.0, 5.0, 0.9)


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_own_values_of_a_built_in_rule_are_an_override_without_effect(rule: Rule):
    own = overridable_fields(rule)
    assert OverrideConfig.model_validate(own).fields() == own
    assert with_overrides(rule, own) == rule
    assert with_overrides(rule, {}) == rule


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.01, 0.5, 40.0])
def test_overridden_rule_is_valid(rule: Rule, threshold: float):
    changed = with_overrides(rule, {"threshold": threshold, "for": 5.0, "severity": "page"})
    assert RuleConfig.model_validate(rule_body(changed)).rule() == changed
    assert changed.above == threshold or changed.below == threshold


def test_clear_level_keeps_its_ratio():
    rule = Rule(name="r", scope="device", value="used_ratio", above=0.8, clear=0.6)
    assert with_overrides(rule, {"threshold": 0.4}).clear == pytest.approx(0.3)
    below = replace(rule, above=None, below=0.5, clear=0.6)
    assert with_overrides(below, {"threshold": 0.25}).clear == pytest.approx(0.3)


def test_severity_replaces_only_its_label():
    rule = Rule(name="r", scope="device", value="up", below=1, labels=(("team", "a"), ("severity", "info")))
    assert with_overrides(rule, {"severity": "page"}).labels == (("team", "a"), ("severity", "page"))
