"""Tests of rules: promtool's notation of series, and the results of a file of tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.features.rules.command import STALE, parse_series, run_file
from tests.helpers.running import gpumond_here

RULES = """
rules:
  - {name: hog, scope: process, value: used_bytes, above: 40GiB, for: 1m,
     annotations: {summary: "pid {pid} holds {used}"}}
"""
TESTS = """
rule_files: [rules.yaml]
tests:
  - interval: 1m
    input_series: [{series: 'process_used_bytes{pid="10"}', values: "1e9 5e10x9"}]
    alert_rule_test:
      - {eval_time: 1m, alertname: hog}
      - eval_time: 1m60s
        alertname: hog
        exp_alerts: [{exp_labels: {pid: "%s"}, exp_annotations: {summary: "pid 10 holds 46.6 GiB"}}]
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "tests.yaml").write_text(TESTS % 10)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("1 2.5 -3 1e9", (1, 2.5, -3, 1e9)),
        ("1x2", (1, 1, 1)),
        ("1+2x3 4-1x2", (1, 3, 5, 7, 4, 3, 2)),
        ("_ 1 _x2 stale", (None, 1, None, None, STALE)),
    ],
)
def test_values_are_in_promtools_notation(text: str, samples: tuple[object, ...]):
    assert parse_series("daemon_agents", text).samples == samples


def test_series_has_scope_value_and_labels():
    series = parse_series('pool_live_bytes{pid="10", workload="a \\"b\\""}', "1")
    assert (series.scope, series.quantity) == ("pool", "live_bytes")
    assert series.labels == (("pid", "10"), ("workload", 'a "b"'))


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("used_ratio", "1", "device_used_ratio"),
        ("device_mood", "1", "device_ and one of up, used_bytes"),
        ("device_up{gpu=0}", "1", "labels as in"),
        ("device_up", "1+1", "0.5x10"),
        ("device_up", "many", "0.5x10"),
        ("device_up", "1x999999999", "more than"),
    ],
)
def test_invalid_series_names_the_expected_form(name: str, values: str, says: str):
    with pytest.raises(ValueError, match=says):
        parse_series(name, values)


def test_failed_expectation_is_shown_with_the_result(files: Path):
    assert run_file(files / "tests.yaml") == (2, [])
    (files / "tests.yaml").write_text(TESTS % 11)
    count, (failure,) = run_file(files / "tests.yaml")
    assert (count, failure.alertname, failure.eval_time) == (2, "hog", 120)
    assert ("pid='11'" in failure.expected, "pid='10'" in failure.got) == (True, True)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("alertname: hog}", "alertname: hug}", "no rule is named 'hug'"),
        ("interval: 1m", "interval: 0", r"tests\[0\].interval"),
    ],
)
def test_invalid_file_is_named(files: Path, before: str, after: str, says: str):
    (files / "tests.yaml").write_text((TESTS % 10).replace(before, after))
    with pytest.raises(ConfigError, match=says):
        run_file(files / "tests.yaml")


def test_missing_file_states_what_is_expected(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"none\.yaml: No such file or directory; expected tests in promtool's format"
    ):
        run_file(tmp_path / "none.yaml")


def test_command_line_checks_and_tests_rules(files: Path):
    shown = gpumond_here("rules", "check", str(files / "rules.yaml")).stdout
    assert "process used_bytes above 40.0 GiB for 1 min" in shown
    assert gpumond_here("rules", "test", str(files / "tests.yaml")).returncode == 0
    (files / "tests.yaml").write_text(TESTS % 11)
    failed = gpumond_here("rules", "test", str(files / "tests.yaml"))
    assert (failed.returncode, "hog at 120 s" in failed.stderr) == (1, True)
    (answer,) = json.loads(gpumond_here("rules", "test", "--json", str(files / "tests.yaml")).stdout)
    assert answer["expectations"] == 2
    assert [(failure["alertname"], failure["eval_time"]) for failure in answer["failures"]] == [("hog", 120.0)]
    (files / "rules.yaml").write_text("rules: [{name: hog}]")
    assert gpumond_here("rules", "check", str(files / "rules.yaml")).returncode == 2


def test_threshold_that_no_value_exceeds_is_a_warning(files: Path):
    rule = "rules: [{name: full, scope: device, value: used_ratio, above: 90}]"
    (files / "rules.yaml").write_text(rule)
    done = gpumond_here("rules", "check", str(files / "rules.yaml"))
    (warning,) = [line for line in done.stdout.splitlines() if "warning" in line]
    assert done.returncode == 0
    assert warning.startswith("    warning: threshold: 90 is out of range: used_ratio is ")
    assert warning.endswith(", so the alert could never fire; set a threshold of less than 1, such as 90%")
    (files / "rules.yaml").write_text(rule.replace("used_ratio", "used"))
    done = gpumond_here("rules", "check", str(files / "rules.yaml"))
    assert done.stderr.endswith(
        "scope device has no value 'used'; did you mean used_bytes, used_ratio or idle_used_ratio?\n"
    )
