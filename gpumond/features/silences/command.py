"""``gpumond silence``: create, list and end silences of alerts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import (
    DONE,
    NOTHING_TO_DO,
    add_option,
    option_type,
    parse_duration,
    parse_time_argument,
    print_error,
    print_result,
)
from gpumond.facts.errors import ConfigError, DaemonError, did_you_mean
from gpumond.facts.frame import OPERATORS
from gpumond.facts.units import caller_text, plural
from gpumond.quantities import SCOPES
from gpumond.quantities.scope import OWNER_LABELS
from gpumond.view.text import table, time_text

ROUTE = "/api/v1/silences"
_MATCHER_PATTERN = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(=~|!~|!=|=)(.*)", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r'\\(["\\])')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="add|list|delete", required=True)
    add = what.add_parser("add", help="stop notifications for alerts that match all these matchers")
    add.add_argument(
        "matchers",
        nargs="+",
        type=option_type(parse_matcher),
        metavar="MATCHER",
        help=f"label matcher with {', '.join(OPERATORS[:-1])} or {OPERATORS[-1]}: rule=leak, 'workload=~train.*'",
    )
    add_option(
        add, "--for DURATION", "length of the silence, such as 1h", dest="duration", type=parse_duration, required=True
    )
    add_option(add, "--reason TEXT", "why you silence these alerts", required=True)
    add_option(
        add,
        "--start TIME",
        "start of the silence: HH:MM or ISO 8601 (UTC unless it has an offset), or a delay such as 30m (default: now)",
        type=option_type(partial(parse_time_argument, in_future=True)),
    )
    add_option(add, "--author NAME", "who is responsible for the silence (default: you)", default="")
    entries = what.add_parser("list", help="list pending and active silences")
    add_option(entries, "--all", "also list silences that ended in the last five days")
    delete = what.add_parser("delete", help="end silences now")
    delete.add_argument("ids", nargs="+", metavar="ID", help="a silence's ID, as `gpumond silence list` shows it")
    for each in (add, entries, delete):
        client.add_arguments(each)


def run(arguments: argparse.Namespace) -> int:
    return {"add": _add, "list": _list, "delete": _delete}[arguments.what](arguments)


def _add(arguments: argparse.Namespace) -> int:
    matchers: list[dict[str, str]] = arguments.matchers
    body = {
        "matchers": matchers,
        "for_seconds": arguments.duration,
        "author": arguments.author,
        "reason": arguments.reason,
    }
    if arguments.start is not None:
        body["starts_at"] = arguments.start
    rules = {each["name"]: each["rule"] for each in client.get(arguments.url, "/api/v1/rules", for_change=True)}
    rule_names = [each["value"] for each in matchers if (each["name"], each["operator"]) == ("rule", "=")]
    if unknown := [name for name in rule_names if name not in rules]:
        remedy = did_you_mean(unknown[0], rules) or "; to list the rules: gpumond rules list"
        raise ConfigError(f"no rule has the name {unknown[0]}{remedy}")
    active = client.get(arguments.url, "/api/v1/alerts")
    labels = {"rule", "alertname", *OWNER_LABELS, *(name for alert in active for name, _ in alert["labels"])}
    for rule in rules.values():
        labels.update(rule.get("labels", ()), SCOPES[rule["scope"]].label_meanings if rule["scope"] in SCOPES else ())
    for name in (each["name"] for each in matchers):
        if name not in labels:
            remedy = did_you_mean(name, sorted(labels)) or f"; the labels are {', '.join(sorted(labels))}"
            raise ConfigError(f"no rule's alerts have the label {name}{remedy}")
    try:
        entry = client.post(arguments.url, ROUTE, body, timeout_seconds=30)
    except DaemonError as error:
        raise DaemonError(re.sub(r"^matchers(\.\d+)?:", "MATCHER:", str(error)), error.status, error.problem) from None
    print_result(arguments, entry, lambda: _created_text(entry))
    alerts = [{"rule": each["rule"], **dict(each["labels"])} for each in active]
    alerts_of_rules = [alert for alert in alerts if alert["rule"] in rule_names]
    unmatched = [
        each["name"] for each in matchers if not any(each["name"] in alert for alert in alerts_of_rules or alerts)
    ]
    if alerts and unmatched:
        names = ", ".join(sorted({name for alert in alerts_of_rules or alerts for name in alert}))
        of_rule = f" of {' and '.join(rule_names)}" if alerts_of_rules else ""
        print_error(f"gpumond: no active alert{of_rule} has the label {', '.join(unmatched)}; the labels are {names}")
    return DONE


def _created_text(entry: Mapping[str, Any]) -> str:
    """Describe a new silence, and the alerts that it matches now if the daemon states them."""
    silence, count = entry["silence"], entry.get("alerts")
    start = f" from {time_text(silence['starts_at'])}" if entry["state"] == "pending" else ""
    verb = "will silence" if start else "silences"
    matched = f"{verb} {plural(count, 'active alert')}" if count else "matches no active alert"
    created = f"silence {silence['id']}{start} until {time_text(silence['ends_at'])}"
    return created if count is None else f"{created}: {matched}"


def _list(arguments: argparse.Namespace) -> int:
    entries = [each for each in client.get(arguments.url, ROUTE) if arguments.all or each["state"] != "ended"]
    header = ("ID", "STATE", "MATCHERS", "STARTS", "ENDS", "AUTHOR", "REASON")
    nothing = "no silence is active; to add one: gpumond silence add rule=NAME --for 1h --reason TEXT"
    user_name = client.user_names(arguments.url)
    rows = [[*_row(entry, user_name)] for entry in entries]
    print_result(arguments, entries, lambda: table(header, rows) if rows else client.paragraph(nothing, arguments.url))
    return DONE


def _delete(arguments: argparse.Namespace) -> int:
    for id in arguments.ids:
        if not re.fullmatch("[0-9a-f]{16}", id):
            raise ConfigError(f"{id!r:.80} isn't a silence's ID; to list the silences: gpumond silence list")
    ended = []
    for id in arguments.ids:
        entry = client.get(arguments.url, f"{ROUTE}/{id}", for_change=True)
        if entry.get("state") == "ended":
            print_error(f"gpumond: silence {id} has already ended, at {time_text(entry['silence']['ends_at'])}")
        else:
            client.delete(arguments.url, f"{ROUTE}/{id}")
            ended.append(id)
    if not ended:
        return NOTHING_TO_DO
    print_result(arguments, {"ended": ended}, lambda: "\n".join(f"silence {id} has ended" for id in ended))
    return DONE


def parse_matcher(text: str) -> dict[str, str]:
    """Parse a matcher such as ``rule=leak``; a value may be in double quotes. Raises ValueError."""
    match = _MATCHER_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected LABEL=TEXT, !=, =~ or !~, for example rule=leak")
    name, operator, value = match.groups()
    if quoted := _QUOTED.fullmatch(value):
        value = _ESCAPE.sub(r"\1", quoted[1])
    return {"name": name, "operator": operator, "value": value}


def _row(entry: Mapping[str, Any], user_name: Callable[[int], str | None]) -> Iterator[str]:
    silence = entry["silence"]
    yield from (silence["id"], entry["state"], _matchers(silence["matchers"]))
    yield from (time_text(silence[name]) for name in ("starts_at", "ends_at"))
    yield from (caller_text(silence["author"], user_name=user_name), silence["reason"])


def _matchers(matchers: Sequence[Mapping[str, str]]) -> str:
    return " ".join(f"{each['name']}{each['operator']}{_quoted(each['value'])}" for each in matchers)


def _quoted(value: str) -> str:
    """Return the value as `parse_matcher` reads it."""
    if value and not re.search(r'[\s"~]', value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
