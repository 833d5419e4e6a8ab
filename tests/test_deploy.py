"""What is in deploy/: accepted by the programs that read it, and in step with the rules of the daemon."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumond.api.examples import SNAPSHOT
from gpumond.config import load
from gpumond.engine import Memory, advance
from gpumond.metrics import Exposition
from gpumond.metrics.telemetry import Telemetry
from gpumond.rules import Rule
from gpumond.rules.built_in import BUILT_IN
from gpumond.rules.cases import run
from gpumond.rules.config import RuleConfig, written
from gpumond.units import seconds
from tests.rules.document import document

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FLEET_ONLY = {"daemon-down", "readings-stale"}


def groups() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in groups() if "alert" in rule}


def accepted(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]} (Debian: prometheus, prometheus-alertmanager)")
    done = subprocess.run([*command[:-1], str(DEPLOY / command[-1])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_their_tests_hold():
    accepted("promtool", "check", "config", "prometheus/prometheus.yaml")
    accepted("promtool", "check", "rules", "prometheus/gpumond.rules.yaml")
    accepted("promtool", "test", "rules", "prometheus/gpumond.rules.test.yaml")


def test_amtool_accepts_the_alertmanager():
    accepted("amtool", "check-config", "alertmanager/alertmanager.yaml")


def test_both_sets_have_the_same_names():
    assert ALERTS.keys() - FLEET_ONLY == {rule.name for rule in BUILT_IN}


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_both_sets_have_the_same_levels(rule: Rule):
    other = ALERTS[rule.name]
    sign, level = (">", rule.above) if rule.above is not None else ("<", rule.below)
    levels = [float(number) for number in re.findall(rf" {sign} (\d+(?:\.\d+)?)", other["expr"])]
    assert level in levels
    assert seconds(other.get("for", 0)) == rule.for_seconds
    assert seconds(other.get("keep_firing_for", 0)) == rule.keep_firing_for_seconds
    assert other["labels"] == dict(rule.labels)


def test_each_alert_has_a_test_that_fires_it_and_one_that_does_not():
    content = yaml.safe_load((DEPLOY / "prometheus/gpumond.rules.test.yaml").read_text())
    checks = [check for test in content["tests"] for check in test["alert_rule_test"]]
    for fires in (True, False):
        assert {check["alertname"] for check in checks if bool(check["exp_alerts"]) == fires} == ALERTS.keys()


def test_each_alert_has_a_runbook():
    text = (ROOT / "docs/operations.md").read_text()
    sections = set(re.findall(r"^### (\S+)$", text, re.MULTILINE))
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name}"
        assert name in sections


def test_the_documentation_of_rules_is_current():
    assert (ROOT / "docs/rules.md").read_text() == document(), "run `make docs`"


def test_the_rules_use_metrics_that_there_are():
    page = Exposition(Telemetry()).page(advance(Memory(), BUILT_IN, SNAPSHOT).frame, "").plain.decode()
    exported = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    recorded = {rule["record"] for rule in groups() if "record" in rule}
    used = {name for rule in groups() for name in re.findall(r"\bgpumond[:_][a-z_:]+\b", rule["expr"])}
    assert used <= exported | recorded


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_each_built_in_rule_can_be_written_in_a_configuration(rule: Rule):
    assert RuleConfig.model_validate(written(rule)).rule() == rule


def test_the_example_is_a_configuration_whose_tests_hold():
    settings = load(DEPLOY / "gpumond.example.yaml", environ={})
    assert [rule.name for rule in settings.rules if rule.action] == ["notebooks-cache"]
    count, failures = run(DEPLOY / "gpumond.example.test.yaml")
    assert (count > 0, failures) == (True, [])
