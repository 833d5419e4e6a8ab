"""``gpumond rules check|test FILE``: check rules, and test them on series of values. ``list``, ``override`` and
``restore``: the daemon's rules. ``test-receiver NAME`` makes the daemon send a test message.

Tests have promtool's format: series of values, evaluation times, and the alerts expected at each time. A series is
``SCOPE_VALUE{label="text", …}``, as ``device_used_ratio{gpu="0", uuid="GPU-a"}``. Its values are in promtool's
notation; ``_`` is unknown, and from ``stale`` on, or after its last value, the subject is gone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gpumond.cli import client
from gpumond.cli.arguments import DONE, FAILED, add_option, parse_duration, print_result
from gpumond.config.loading import key_text, load_settings, read_yaml
from gpumond.config.models import MISSING, Seconds, StrictModel, expectation
from gpumond.config.settings import Settings
from gpumond.facts import units
from gpumond.facts.alerts import AlertStates, Labels, Rule, RuleScope
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.frame import Alert
from gpumond.facts.units import size_text
from gpumond.features.rules.evaluation import evaluate_rule
from gpumond.features.rules.settings import PLACEHOLDERS, QUANTITIES, UNITS, check_range, rule_body
from gpumond.quantities.quantity import Unit, value_text
from gpumond.quantities.scope import Subjects, UnreadableSubjects
from gpumond.view.text import MIN_LAST_WIDTH, table

COMMANDS = {
    "check": "check a configuration file's rules and list the active rules",
    "test": "test your rules with sample values and expected alerts",
    "list": "list the daemon's rules, with their origin and overrides",
    "override": "override fields of one of the built-in rules",
    "restore": "delete a built-in rule's override",
    "test-receiver": "send a test message to one of your receivers",
}
RULES_ROUTE = "/api/v1/rules"
UNPROCESSABLE = 422
HEADER = ("RULE", "ORIGIN", "SEVERITY", "FIRES WHEN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="check|test|list|override|restore|test-receiver", required=True)
    commands = {name: what.add_parser(name, help=summary) for name, summary in COMMANDS.items()}
    check, test, _, override, restore, receiver = commands.values()
    check.add_argument("file", type=Path, metavar="FILE", help="configuration file, or file with rules")
    add_option(check, "--json", "print the active rules as JSON")
    test.add_argument("file", type=Path, metavar="FILE", nargs="+", help="file with tests")
    add_option(test, "--json", "print the number of expectations and the failures as JSON")
    for each in (override, restore):
        each.add_argument("name", metavar="NAME", help="a built-in rule's name")
    add_option(override, "--threshold THRESHOLD", "new threshold, such as 0.9, 90%% or 1GiB")
    add_option(
        override,
        "--for DURATION",
        "how long the value must be beyond the threshold before the alert fires, such as 5m",
        type=parse_duration,
    )
    add_option(override, "--severity WORD", "new severity, such as info, warning or critical")
    state = override.add_mutually_exclusive_group()
    add_option(state, "--enable", "evaluate the rule", dest="enabled", default=None)
    add_option(state, "--disable", "don't evaluate the rule", dest="enabled", action="store_false", default=None)
    receiver.add_argument("name", metavar="NAME", help="a receiver's name in the daemon's configuration")
    for name in ("list", "override", "restore", "test-receiver"):
        client.add_arguments(commands[name])


def run(arguments: argparse.Namespace) -> int:
    actions = {"check": _check, "test": _test, "list": _list, "test-receiver": _test_receiver}
    if arguments.what in actions:
        return actions[arguments.what](arguments)
    try:
        return _change(arguments)
    except DaemonError as error:
        if error.status != client.NOT_FOUND or str(error).endswith("?"):
            raise
        listing = "to list the rules and their overrides: gpumond rules list"
        raise DaemonError(f"{error}; {listing}", error.status) from None


def _test_receiver(arguments: argparse.Namespace) -> int:
    name = urllib.parse.quote(arguments.name, safe="")
    result = client.post(arguments.url, f"/api/v1/receivers/{name}/test", {}, timeout_seconds=30)

    def text() -> str:
        status = "" if result["status"] is None else f" with status {result['status']}"
        if result["accepted"]:
            return f"{arguments.name} accepted the message{status} after {result['duration_seconds']:.2f} s"
        return f"{arguments.name} didn't accept the message: {result['reason']}: {result['detail']}"

    print_result(arguments, result, text)
    return DONE if result["accepted"] else FAILED


def _list(arguments: argparse.Namespace) -> int:
    entries = client.get(arguments.url, RULES_ROUTE)
    print_result(arguments, entries, lambda: _table(entries))
    return DONE


def _change(arguments: argparse.Namespace) -> int:
    """Override fields of a rule, which the daemon checks, or restore it."""
    route = f"{RULES_ROUTE}/{urllib.parse.quote(arguments.name, safe='')}"
    if arguments.what == "override":
        given = {name: getattr(arguments, name) for name in ("threshold", "for", "severity", "enabled")}
        fields = {name: value for name, value in given.items() if value is not None}
        if not fields:
            raise ConfigError("pass at least one of --threshold, --for, --severity, --enable and --disable")
        try:
            entry = client.put(arguments.url, f"{route}/override", fields)
        except DaemonError as error:
            if error.status != UNPROCESSABLE:
                raise
            raise ConfigError(str(error).replace("body.", "--")) from None
    else:
        client.delete(arguments.url, f"{route}/override")
        entry = client.get(arguments.url, route)
    print_result(arguments, entry, lambda: _table([entry]))
    return DONE


def _table(entries: Iterable[Mapping[str, Any]]) -> str:
    return table(HEADER, map(_row, entries), None, ("ORIGIN",), "gpumond rules list --json", MIN_LAST_WIDTH)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one rule as the daemon describes it."""
    rule = entry["rule"]
    scope, value, side = rule["scope"], rule["value"], "above" if "above" in rule else "below"
    unit = UNITS.get(scope, {}).get(value, "count")
    duration = f" for {units.duration_text(rule['for'])}" if rule.get("for") else ""
    when = f"{scope} {value} {side} {value_text(unit, rule[side])}{duration}" if entry["enabled"] else "disabled"
    overrides = ", ".join(_override_texts(entry["overrides"], unit))
    return (
        entry["name"],
        entry["origin"],
        rule.get("labels", {}).get("severity", ""),
        when + (f"; overridden: {overrides}" if overrides else ""),
    )


def _override_texts(fields: Mapping[str, Mapping[str, Any]], unit: Unit) -> Iterator[str]:
    for name, field in fields.items():
        value, default = (_field_text(name, unit, field[key]) for key in ("value", "default"))
        yield f"{name} {value} ({field['origin']}; default {default})"


def _field_text(name: str, unit: Unit, value: Any) -> str:
    if name == "threshold":
        return value_text(unit, value)
    return units.duration_text(value) if name == "for" else str(value).lower()


def _check(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments.file, environ={})
    rules = settings.active_rules()
    print_result(
        arguments,
        [rule_body(rule) for rule in rules],
        lambda: "\n".join(_report_lines(arguments.file, settings, rules)),
    )
    return DONE


def _report_lines(file: Path, settings: Settings, rules: Sequence[Rule]) -> Iterator[str]:
    in_file, overrides = {rule.name for rule in settings.rules}, settings.rule_overrides
    yield f"{file}: rules in the file: {len(in_file)}, active rules: {len(rules)}"
    for rule in rules:
        origin = "" if rule.name in in_file else " (built in)"
        if rule.name in overrides:
            origin = f" (built in; the file overrides {', '.join(overrides[rule.name])})"
        yield f"  {rule.name}{origin}: {_rule_text(rule)}"
        is_above = rule.above is not None
        try:
            check_range(rule.above if is_above else rule.below, QUANTITIES[rule.scope][rule.value], is_above)
        except ValueError as error:
            yield f"    warning: {error}"
    for name, fields in overrides.items():
        if not fields.get("enabled", True):
            yield f"  {name} (built in): disabled in the file"


def _rule_text(rule: Rule) -> str:
    side, threshold = ("above", rule.above) if rule.above is not None else ("below", rule.below)
    duration = f" for {units.duration_text(rule.for_seconds)}" if rule.for_seconds else ""
    matchers = "".join(f", {name} {pattern}" for name, pattern in rule.match)
    limit = value_text(UNITS[rule.scope][rule.value], threshold or 0.0)
    return f"{rule.scope} {rule.value} {side} {limit}{duration}{matchers}"


def _test(arguments: argparse.Namespace) -> int:
    results = {file: run_file(file) for file in arguments.file}
    code = FAILED if any(failures for _, failures in results.values()) else DONE
    if arguments.json:
        answer = [
            {"file": str(file), "expectations": count, "failures": [asdict(failure) for failure in failures]}
            for file, (count, failures) in results.items()
        ]
        print(json.dumps(answer, indent=2))
        return code
    for file, (count, failures) in results.items():
        print(f"{file}: {count - len(failures)} of {units.plural(count, 'expectation')} met")
        for failure in failures:
            print(
                f"  FAILED {failure.test}: {failure.alertname} at {failure.eval_time:g} s\n"
                f"  expected\n    {failure.expected}\n  got\n    {failure.got}",
                file=sys.stderr,
            )
    return code


STALE = "stale"
Sample = float | str | None
"""A value, None if it is unknown, or STALE if the subject no longer exists."""

MAX_SAMPLES = 100_000

_SERIES_PATTERN = re.compile(r"([a-z]+)_(\w+)(?:\{(.*)\})?")
_LABEL_PATTERN = re.compile(r'\s*(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_RUN_PATTERN = re.compile(rf"({_NUMBER})(?:([+-])(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?))?(?:x(\d+))?")
_BLANK_PATTERN = re.compile(r"_(?:x(\d+))?")


class ExpectedAlert(StrictModel):
    exp_labels: dict[str, str] = Field(default_factory=dict)
    exp_annotations: dict[str, str] | None = None


class Expectation(StrictModel):
    eval_time: Seconds
    alertname: str
    exp_alerts: tuple[ExpectedAlert, ...] = ()


class InputSeries(StrictModel):
    series: str
    values: str


class RuleTest(StrictModel):
    name: str = ""
    interval: Seconds = Field(default=60.0, gt=0)
    input_series: tuple[InputSeries, ...]
    alert_rule_test: tuple[Expectation, ...] = Field(min_length=1)


class RuleTestFile(StrictModel):
    rule_files: tuple[Path, ...] = ()
    evaluation_interval: Seconds = Field(default=60.0, gt=0)
    tests: tuple[RuleTest, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Failure:
    test: str
    alertname: str
    eval_time: float
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class InputValues:
    scope: RuleScope
    quantity: str
    labels: Labels
    samples: tuple[Sample, ...]


EXPECTED_TESTS = "tests in promtool's format, such as deploy/gpumond.example.test.yaml"


def run_file(file: Path) -> tuple[int, list[Failure]]:
    """Return the number of expectations and the failures. Raises ConfigError."""
    try:
        content = RuleTestFile.model_validate(read_yaml(file, expected=EXPECTED_TESTS))
        rules = {rule.name: rule for rule in _rules(file.parent, content.rule_files)}
        failures = [
            failure
            for number, test in enumerate(content.tests)
            for failure in _failures(test, test.name or f"tests[{number}]", rules, content.evaluation_interval)
        ]
    except ValidationError as error:
        first_error = error.errors()[0]
        message = expectation(first_error)
        if first_error["loc"] == ("tests",) and message == MISSING:
            message = "missing; this isn't a file of rule tests (see docs/reference/rules.md#test-a-rule)"
        raise ConfigError(f"{file}: {key_text(first_error['loc'])}: {message}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    return sum(len(test.alert_rule_test) for test in content.tests), failures


def _rules(directory: Path, files: Sequence[Path]) -> Iterator[Rule]:
    """Return the active rules of each configuration file; without a file, the built-in rules."""
    for file in files or (None,):
        yield from load_settings(directory / file if file else None, environ={}).active_rules()


def _failures(test: RuleTest, name: str, rules: Mapping[str, Rule], interval_seconds: float) -> Iterator[Failure]:
    series = [parse_series(entry.series, entry.values) for entry in test.input_series]
    checks = sorted(test.alert_rule_test, key=lambda check: check.eval_time)
    for check in checks:
        if check.alertname not in rules:
            raise ValueError(f"{name}: no rule is named {check.alertname!r}; the rules are {', '.join(rules)}")
    alert_states: dict[str, AlertStates] = {check.alertname: {} for check in checks}
    if checks[-1].eval_time / interval_seconds > MAX_SAMPLES:
        raise ValueError(f"{name}: more than {MAX_SAMPLES} evaluations")
    at, evaluations = 0.0, 0
    for check in checks:
        while at <= check.eval_time:
            index = int(at / test.interval + 1e-9)
            for rule_name, before in alert_states.items():
                rule = rules[rule_name]
                alert_states[rule_name] = evaluate_rule(
                    rule, _subjects(rule.scope, series, index), before, UnreadableSubjects(), at, at
                )
            evaluations += 1
            at = evaluations * interval_seconds
        alerts = [a.alert for a in alert_states[check.alertname].values() if a.alert.phase == "firing"]
        if not _is_met(check.exp_alerts, alerts):
            expected = _alerts_text((alert.exp_labels, alert.exp_annotations) for alert in check.exp_alerts)
            raised = _alerts_text((_own_labels(alert), dict(alert.annotations)) for alert in alerts)
            yield Failure(name, check.alertname, check.eval_time, expected, raised)


_TestRow = tuple[Labels, dict[str, float | None]]
"""The values at one time of the subject with these labels."""


def _subjects(scope: RuleScope, series: Iterable[InputValues], index: int) -> Subjects[_TestRow]:
    rows: dict[Labels, dict[str, float | None]] = {}
    for entry in series:
        sample = entry.samples[index] if index < len(entry.samples) else STALE
        if entry.scope == scope and not isinstance(sample, str):
            rows.setdefault(entry.labels, {})[entry.quantity] = sample
    return Subjects(
        rows=tuple(rows.items()),
        values={name: partial(_value, name) for name in QUANTITIES[scope]},
        units=UNITS[scope],
        labels=lambda row: row[0],
        texts={name: partial(_placeholder_text, name) for name in PLACEHOLDERS[scope]},
        programs=lambda row: tuple(text for name, text in row[0] if name == "workload"),
    )


def _value(name: str, row: _TestRow) -> float | None:
    return row[1].get(name)


def _placeholder_text(name: str, row: _TestRow) -> str:
    """Return the text of a placeholder: ``unknown`` for a value without a series."""
    value = row[1].get(f"{name}_bytes")
    return dict(row[0]).get(name) or ("unknown" if value is None else size_text(value))


def _is_met(expected: Sequence[ExpectedAlert], alerts: Sequence[Alert]) -> bool:
    remaining = list(alerts)
    for each in expected:
        for alert in remaining:
            has_annotations = each.exp_annotations is None or each.exp_annotations == dict(alert.annotations)
            if has_annotations and each.exp_labels == _own_labels(alert):
                remaining.remove(alert)
                break
        else:
            return False
    return not remaining


def _own_labels(alert: Alert) -> dict[str, str]:
    return {name: text for name, text in alert.labels if name != "alertname"}


def _alerts_text(alerts: Iterable[tuple[Mapping[str, str], Mapping[str, str] | None]]) -> str:
    lines = [
        " ".join(f"{name}={text!r}" for part in (labels, annotations or {}) for name, text in sorted(part.items()))
        for labels, annotations in alerts
    ]
    return "\n    ".join(sorted(lines)) or "nothing"


def parse_series(name: str, values: str) -> InputValues:
    """Parse the name and labels of a series. Raises ValueError."""
    match = _SERIES_PATTERN.fullmatch(name.strip())
    scope = next((scope for scope in QUANTITIES if match and match[1] == scope), None)
    if match is None or scope is None or match[2] not in QUANTITIES[scope]:
        expected = (
            f"{scope}_ and one of {', '.join(QUANTITIES[scope])}"
            if scope
            else 'a name such as device_used_ratio{gpu="0"}'
        )
        raise ValueError(f"series {name!r}: expected {expected}")
    labels, rest = {}, match[3] or ""
    while rest.strip():
        label = _LABEL_PATTERN.match(rest)
        if label is None:
            raise ValueError(f'series {name!r}: expected labels as in {{gpu="0"}}')
        labels[label[1]] = re.sub(r"\\(.)", r"\1", label[2])
        rest = rest[label.end() :]
    return InputValues(scope, match[2], tuple(sorted(labels.items())), tuple(_samples(values)))


def _samples(text: str) -> Iterator[Sample]:
    """Parse promtool's notation: ``1``, ``1x3`` (4 times), ``1+2x3`` (1 3 5 7), ``_``, ``_x3``, ``stale``."""
    for word in text.split():
        run, blank = _RUN_PATTERN.fullmatch(word), _BLANK_PATTERN.fullmatch(word)
        times = int((run and run[4]) or (blank and blank[1]) or 0)
        if times > MAX_SAMPLES:
            raise ValueError(f"values {word!r}: more than {MAX_SAMPLES}")
        if word == STALE:
            yield STALE
        elif blank:
            yield from [None] * (times or 1)
        elif run and (run[2] is None or run[4]):
            slope = float(f"{run[2]}{run[3]}") if run[2] else 0.0
            yield from (float(run[1]) + slope * number for number in range(times + 1))
        else:
            raise ValueError(f"values {word!r}: expected numbers, 0.5x10, 0+0.1x8, _, _x5 or stale")
