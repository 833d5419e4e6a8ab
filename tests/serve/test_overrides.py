"""HTTP API of overrides: fields of built-in rules, their origin, and concurrent writers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpumond.config.settings import Settings
from gpumond.facts.alerts import Rule
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.registry import override_table
from tests.serve.application import HOG, TOKEN, View, ask

FULL = next(rule for rule in BUILT_IN if rule.name == "device-nearly-full")


def put(view: View, body: dict[str, Any], name: str = "device-nearly-full", **headers: str) -> Any:
    return ask(view, f"/api/v1/rules/{name}/override", "PUT", headers=TOKEN | headers, json=body)


def delete(view: View, name: str = "device-nearly-full", **headers: str) -> Any:
    return ask(view, f"/api/v1/rules/{name}/override", "DELETE", headers=TOKEN | headers)


def in_effect(view: View, name: str = "device-nearly-full") -> Rule | None:
    return next((rule for rule in view.rulebook.rules if rule.name == name), None)


def test_override_replaces_fields_and_its_deletion_restores_them():
    view = View()
    default = ask(view, "/api/v1/rules/device-nearly-full").json()
    assert (default["origin"], default["enabled"], default["overrides"]) == ("built-in", True, {})
    made = put(view, {"threshold": "90%", "for": "5m", "severity": "critical"})
    assert (made.status_code, made.headers["location"]) == (200, "/api/v1/rules/device-nearly-full")
    read = ask(view, "/api/v1/rules/device-nearly-full").json()
    assert read == made.json()
    assert read["etag"] == made.headers["etag"].strip('"') != default["etag"]
    assert (read["origin"], read["enabled"]) == ("built-in", True)
    assert read["overrides"] == {
        "threshold": {"origin": "api", "value": 0.9, "default": 0.97},
        "for": {"origin": "api", "value": 300.0, "default": 60.0},
        "severity": {"origin": "api", "value": "critical", "default": "warning"},
    }
    assert (read["rule"]["above"], read["rule"]["for"]) == (0.9, 300.0)
    rule = in_effect(view)
    assert rule is not None
    assert (rule.above, rule.clear, rule.for_seconds) == (0.9, pytest.approx(0.9 * 0.95 / 0.97), 300.0)
    assert rule.labels == (("severity", "critical"),)
    assert rule.annotations == FULL.annotations
    assert delete(view).status_code == 204
    assert ask(view, "/api/v1/rules/device-nearly-full").json() == default
    assert in_effect(view) == FULL
    assert delete(view).status_code == 404


def test_put_replaces_the_whole_override():
    view = View()
    put(view, {"threshold": 0.9, "for": 10})
    assert put(view, {"severity": "info"}).json()["overrides"].keys() == {"severity"}


def test_disabled_rule_is_listed_and_not_evaluated():
    view = View()
    assert put(view, {"enabled": False}).json()["enabled"] is False
    assert in_effect(view) is None
    listed = {entry["name"]: entry["enabled"] for entry in ask(view, "/api/v1/rules").json()}
    assert listed == {rule.name: rule.name != "device-nearly-full" for rule in BUILT_IN}
    assert ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG | {"name": FULL.name}).status_code == 409
    assert put(view, {"enabled": True}).json()["enabled"] is True
    assert in_effect(view) == FULL


def test_level_of_a_rule_below_a_level():
    view = View()
    put(view, {"threshold": 0.5}, "persistence-mode-off")
    rule = in_effect(view, "persistence-mode-off")
    assert rule is not None
    assert (rule.above, rule.below) == (None, 0.5)


def test_fields_of_the_file_take_precedence_and_are_read_only():
    view = View()
    put(view, {"threshold": 0.7, "for": 10})
    file = {"device-nearly-full": {"threshold": 0.95, "severity": "page"}, "leak": {"enabled": False}}
    view.rulebook.configure(Settings(rule_overrides=file))
    read = ask(view, "/api/v1/rules/device-nearly-full").json()
    origins = {name: (field["origin"], field["value"]) for name, field in read["overrides"].items()}
    assert origins == {"threshold": ("file", 0.95), "severity": ("file", "page"), "for": ("api", 10.0)}
    refused = put(view, {"threshold": 0.6, "for": 20})
    assert refused.status_code == 409
    assert "the configuration file overrides threshold; change it there" in refused.json()["detail"]
    assert put(view, {"for": 20}).json()["overrides"]["for"]["value"] == 20
    assert in_effect(view, "leak") is None
    view.rulebook.configure(Settings())
    assert ask(view, "/api/v1/rules/device-nearly-full").json()["overrides"].keys() == {"for"}


def test_only_built_in_rules_have_overrides():
    view = View()
    view.rulebook.configure(Settings(rules=(Rule(name="mine", scope="device", value="used_ratio", above=0.5),)))
    ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG)
    for name, status, hint in (
        ("mine", 409, "configuration file"),
        ("hog", 409, "PUT /api/v1/rules/hog"),
        ("nothing", 404, "no rule has the name nothing"),
        ("leaks", 404, "no rule has the name leaks; did you mean leak?"),
    ):
        answer = put(view, {"threshold": 1}, name)
        assert (answer.status_code, hint in answer.json()["detail"]) == (status, True)
    assert view.store.names("rule_overrides") == []
    assert delete(view, "leaks").json()["detail"] == "no rule has the name leaks; did you mean leak?"


def test_if_match_of_another_version_changes_nothing():
    view = View()
    before = ask(view, "/api/v1/rules/device-nearly-full").headers["etag"]
    first = put(view, {"threshold": 0.9}, **{"If-Match": before})
    assert first.status_code == 200
    assert put(view, {"threshold": 0.95}, **{"If-Match": before}).status_code == 412
    assert delete(view, **{"If-Match": before}).status_code == 412
    assert ask(view, "/api/v1/rules/device-nearly-full").json()["rule"]["above"] == 0.9
    assert delete(view, **{"If-Match": first.headers["etag"]}).status_code == 204


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, "set at least one of threshold, for, severity, enabled"),
        ({"threshold": None}, "set at least one of"),
        ({"threshold": "lots"}, "80%"),
        ({"threshold": "2GiB"}, "threshold: 2GiB is a size, but `unreclaimable_ratio` is a ratio"),
        ({"for": "soon"}, "expected a duration"),
        ({"severity": "a b"}, "severity"),
        ({"enabled": "perhaps"}, "enabled"),
        ({"above": 1}, "above"),
    ],
)
def test_invalid_override_names_the_expected_values(body: dict[str, Any], detail: str):
    view = View()
    answer = put(view, body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (422, True)
    assert view.rulebook.rules == BUILT_IN


def test_overrides_require_a_token():
    view = View()
    assert ask(view, "/api/v1/rules/leak/override", "PUT", json={"threshold": 1}).status_code == 401
    assert ask(view, "/api/v1/rules/leak/override", "DELETE").status_code == 401
    assert view.store.names("rule_overrides") == []


def test_override_that_cannot_be_stored_is_not_in_effect():
    view = View()
    view.store.full = True
    assert put(view, {"threshold": 0.9}).status_code == 507
    assert in_effect(view) == FULL


def test_stored_override_that_cannot_be_read_is_left_out_and_named():
    view = View()
    for name, fields in (
        ("leak", {"mood": 1}),
        ("device-nearly-full", {"threshold": 0.9}),
        ("former", {"threshold": 1}),
    ):
        asyncio.run(override_table(view.store).put(name, fields))
    (wrong,) = asyncio.run(view.rulebook.load())
    assert wrong.startswith("override of leak: ")
    rule = in_effect(view)
    assert rule is not None
    assert rule.above == 0.9
    assert delete(view, "former").status_code == 204
