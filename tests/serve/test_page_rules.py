"""The page's rules without a browser: their text, the fields of the editor, and the intervals of a preview."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import UNITS, RuleConfig, rule_body
from tests.serve.application import View, ask
from tests.serve.page_modules import needs_node, run_module

pytestmark = needs_node

BY_MATCH: dict[str, Any] = {
    "name": "large-program",
    "scope": "workload",
    "value": "held_bytes",
    "above": 3 << 30,
    "clear": 2e9,
    "for": 90.0,
    "match": {"workload": "train-*", "uid": "1000"},
    "labels": {"team": "research", "severity": "critical"},
    "action": {"flush": {"min_reclaimable": 1 << 30}, "cooldown": 900.0, "max_per_hour": 2},
}
RULES = [rule_body(rule) for rule in BUILT_IN] + [BY_MATCH]


def test_description_of_the_api_names_the_values_of_each_scope():
    value = ask(View(), "/openapi.json").json()["components"]["schemas"]["RuleConfig"]["properties"]["value"]
    assert value["x-values"] == {scope: dict(units) for scope, units in UNITS.items()}
    assert {scope: set(meanings) for scope, meanings in value["x-meanings"].items()} == {
        scope: set(units) for scope, units in UNITS.items()
    }


def test_fields_of_the_editor_state_the_same_rule():
    found = run_module("ruleform", "given.map((rule) => m.ruleOf(m.fieldsOf(rule)))", *RULES)
    assert [RuleConfig(**each).rule() for each in found] == [RuleConfig(**rule).rule() for rule in RULES]


def test_fields_are_as_a_user_writes_them():
    fields = run_module("ruleform", "m.fieldsOf(given[0])", BY_MATCH)
    assert {name: fields[name] for name in ("side", "threshold", "for", "severity", "action", "cooldown")} == {
        "side": "above",
        "threshold": "3GiB",
        "for": "90s",
        "severity": "critical",
        "action": "flush",
        "cooldown": "15m",
    }


def test_labels_and_annotations_are_lines():
    labels = {"team": "a=b", "severity": "critical"}
    rule = BY_MATCH | {"labels": labels, "annotations": {"summary": "x, y=1", "description": "one\ntwo"}}
    fields = run_module("ruleform", "m.fieldsOf(given[0])", rule)
    assert (fields["labels"], fields["annotations"]) == ("team=a=b", "summary=x, y=1\ndescription=one\ntwo")
    assert "labels" not in fields["others"]
    for text, own in {"team = ml\n tier = a": {"team": "ml", "tier": "a"}, "team": {"team": None}}.items():
        found = run_module("ruleform", "m.ruleOf(given[0])", fields | {"labels": text})
        assert found["labels"] == own | {"severity": "critical"}


def test_action_that_is_not_chosen_is_refused_and_that_of_no_key_is_the_default():
    fields = run_module("ruleform", "m.fieldsOf(given[0])", BY_MATCH)
    without = {**fields, "action": "", "cooldown": ""}
    chosen = {**without, "action": "flush and suspend", "others": ""}
    problems = run_module("ruleform", "given.map((fields) => m.problemOf(fields))", fields, without, chosen)
    assert problems == ["", 'Choose an action above, or remove "action" here.', ""]
    assert run_module("ruleform", "m.ruleOf(given[0])", chosen)["action"] == {"flush": {}, "suspend": True}


EXPRESSIONS = {
    "device-nearly-full": "device: unreclaimable above 97%",
    "device-lost": "device: not up",
    "ecc-uncorrected": "device: ECC uncorrected volatile above 0",
    "power-throttling": "device: throttle software power cap",
    "leak": "process with the verdict leak",
    "large-program": "workload (workload=train-*, uid=1000): held above 3.0 GiB",
}


LEVELS: list[tuple[str, Any, Any]] = [
    ("used_ratio", "50%", 5.0),
    ("used_ratio", 0.25, 2.5),
    ("used_bytes", "1.5KiB", 1536.0),
    ("live_bytes", 4, 4),
    ("processes", 4, None),
    ("used_bytes", "much", None),
]


def test_level_is_drawn_where_the_chart_shows_the_value():
    given = [{"value": value, "above": threshold} for value, threshold, _ in LEVELS]
    found = run_module("ruleform", "given.map((rule) => m.levelBytes(rule, 10))", *given)
    assert found == [each for *_, each in LEVELS]


def test_rule_is_shown_as_a_comparison():
    found = run_module("ruleform", "given.map((rule) => m.expression(rule))", *RULES)
    shown = {rule["name"]: text for rule, text in zip(RULES, found, strict=True)}
    assert {name: shown[name] for name in EXPRESSIONS} == EXPRESSIONS


REFUSALS = {
    "body.above: expected a number": "Threshold: expected a number",
    "body: match: scope device has no label 'a'": "Match: scope device has no label 'a'",
    "body.action.cooldown: expected a duration": "Cooldown: expected a duration",
    "body.annotations.x: expected a text": "annotations.x: expected a text",
    "body: set exactly one of above and below": "set exactly one of above and below",
    "name 'used' is taken": "name 'used' is taken",
}


def test_refusal_names_the_field():
    labels = {"above": "Threshold", "match": "Match", "cooldown": "Cooldown"}
    found = run_module("ruleform", "given.slice(1).map((text) => m.refusalText(text, given[0]))", labels, *REFUSALS)
    assert found == list(REFUSALS.values())


THRESHOLDS = [
    ("device", "used_ratio", "above", "90%", True),
    ("device", "used_ratio", "above", "90", False),
    ("device", "used_ratio", "above", "0.9", False),
    ("device", "used_ratio", "above", "100%", False),
    ("device", "used_ratio", "below", "100%", True),
    ("device", "used_ratio", "below", "0%", False),
    ("process", "used_ratio", "above", "120%", True),
    ("device", "up", "above", "1", False),
    ("device", "up", "above", "0", True),
    ("device", "used_bytes", "above", "90", True),
]


def test_threshold_that_no_value_exceeds_is_refused():
    given = [dict(zip(("scope", "value", "side", "threshold"), each, strict=False)) for each in THRESHOLDS]
    found = run_module("ruleform", "given.map((fields) => m.thresholdProblem(fields) === '')", *given)
    assert found == [valid for *_, valid in THRESHOLDS]


OTHERS = {"": True, '{"a": 1}': True, "[1]": False, "{": False, "1": False}


@pytest.mark.parametrize(("text", "valid"), OTHERS.items())
def test_other_keys_are_a_json_object(text: str, valid: bool):
    assert (run_module("ruleform", "m.problemOf({ others: given[0], action: '' })", text) == "") is valid


def test_override_contains_what_differs_and_what_the_api_overrides():
    rule = next(rule for rule in RULES if rule["name"] == "device-nearly-full")
    overridden = {"severity": {"origin": "api", "value": "critical", "default": "warning"}}
    by_file = {"for": {"origin": "file", "value": 5.0, "default": 60.0}}
    entry = {"rule": rule, "enabled": True, "overrides": overridden | by_file}
    expression = "m.overrideOf({ ...m.fieldsOf(given[0].rule), enabled: true, ...given[1] }, given[0])"
    assert run_module("ruleform", expression, entry, {}) == {"severity": "critical"}
    changes = {"threshold": "90%", "for": "", "enabled": False}
    expected = {"severity": "critical", "threshold": "90%", "for": "0s", "enabled": False}
    assert run_module("ruleform", expression, entry, changes) == expected


def alert(at: float, end: float | None, uuid: str | None, pid: int | None = None) -> dict[str, Any]:
    labels = [["alertname", "r"], *([["uuid", uuid]] if uuid else [])]
    times = {"active_at": at - 5, "fired_at": at, "resolved_at": end}
    process = {"pid": pid, "start_ticks": None if pid is None else 7}
    return {"rule": "r", "labels": labels, "annotations": [["summary", f"at {at}"]], **times, **process}


def test_preview_is_drawn_as_intervals_of_each_subject():
    fired = [alert(10, 20, "GPU-a"), alert(30, None, "GPU-a"), alert(15, 25, "GPU-b", 7), alert(40, 50, None)]
    found = run_module("ruleform", "m.spansOf(given[0], given[1])", {"fired": fired, "to_at": 60}, 4)
    spans = {(each["uuid"], each["pid"]): [(span["from"], span["to"]) for span in each["spans"]] for each in found}
    assert spans == {(None, None): [(40, 50)], ("GPU-b", 7): [(15, 25)], ("GPU-a", None): [(30, 60), (10, 20)]}
    (newest,) = run_module("ruleform", "m.spansOf(given[0], given[1])", {"fired": fired, "to_at": 60}, 1)
    assert newest["uuid"] is None


def test_curves_of_two_baselines_have_one_scale():
    def side(levels: list[float]) -> Any:
        distribution = {"levels": levels, "peak": 8, "typical": 4, "low": 2, "high": 8}
        return {"workloads": [{"workload": "train", "measures": [{"measure": "used", "distribution": distribution}]}]}

    expression = "m.curves(given[0], given[1])"
    (found,) = run_module("curves", expression, side([4, 8]), side([2]))
    assert found == {
        "workload": "train",
        "top": 8,
        "before": "M0 50.00H500.00V0.00H1000.00",
        "after": "M0 75.00H1000.00",
    }


def test_out_of_memory_errors_in_words_leave_out_those_that_the_program_repeated():
    rules = {rule["name"]: rule for rule in RULES}
    shown = run_module("ruleform", "given.map(m.expression)", rules["out-of-memory"], rules["allocation-retries"])
    assert shown == [
        "pool: out-of-memory errors that retry_on_oom didn\u2019t repeat in 10 min above 0",
        "pool: retries in 10 min above 5",
    ]
