"""``gpumond rules check|test FILE``: check rules, and test them on series of values."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gpumond.cli import DONE, FAILED, rule_tests
from gpumond.config import load
from gpumond.rules import Rule, readable
from gpumond.rules.config import written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="check|test", required=True)
    check = what.add_parser("check", help="check the rules of a configuration file, and list the active rules")
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--json", action="store_true", help="print the active rules as JSON")
    test = what.add_parser("test", help="run tests of rules: series, times, expected alerts (docs/reference/rules.md)")
    test.add_argument("file", type=Path, metavar="FILE", nargs="+")


def run(arguments: argparse.Namespace) -> int:
    return _check(arguments) if arguments.what == "check" else _test(arguments.file)


def _check(arguments: argparse.Namespace) -> int:
    settings = load(arguments.file, environ={})
    rules = settings.active_rules()
    if arguments.json:
        print(json.dumps([written(rule) for rule in rules], indent=2))
        return DONE
    own = {rule.name for rule in settings.rules}
    print(f"{arguments.file}: rules in the file: {len(own)}, active rules: {len(rules)}")
    for rule in rules:
        print(f"  {rule.name}{'' if rule.name in own else ' (built in)'}: {_sentence(rule)}")
    return DONE


def _sentence(rule: Rule) -> str:
    side, level = ("above", rule.above) if rule.above is not None else ("below", rule.below)
    held = f" for {rule.for_seconds:g} s" if rule.for_seconds else ""
    whom = "".join(f", {name} {pattern}" for name, pattern in rule.match)
    return f"{rule.scope} {rule.value} {side} {readable(rule.value, level or 0.0)}{held}{whom}"


def _test(files: list[Path]) -> int:
    failed = False
    for file in files:
        count, failures = rule_tests.run(file)
        failed = failed or bool(failures)
        print(f"{file}: {count - len(failures)} of {count} expectations met")
        for failure in failures:
            print(
                f"  FAILED {failure.test}: {failure.alertname} at {failure.eval_time:g} s\n"
                f"  expected\n    {failure.expected}\n  got\n    {failure.got}",
                file=sys.stderr,
            )
    return FAILED if failed else DONE
