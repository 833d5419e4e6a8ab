"""``gpumond rules list|override|restore``: the daemon's rules, and overrides of built-in rules. Not a verb."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from gpumond.cli import DONE, client
from gpumond.cli.table import table
from gpumond.quantities import Unit
from gpumond.rules import readable
from gpumond.rules.schema import UNITS

ACTIONS = ("list", "override", "restore")
ROUTE = "/api/v1/rules"
HEADER = ("RULE", "ORIGIN", "FIRES WHEN", ">FOR", "SEVERITY", "OVERRIDDEN")


def add_arguments(what: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    entries = what.add_parser("list", help="list the daemon's rules, with their origin and overrides")
    override = what.add_parser("override", help="replace fields of a built-in rule of the daemon")
    override.add_argument("name", metavar="NAME", help="a built-in rule")
    override.add_argument("--level", metavar="LEVEL", help="level of above or below, such as 0.9, 90%% or 1GiB")
    override.add_argument("--for", dest="duration", metavar="DURATION", help="duration before it fires, such as 5m")
    override.add_argument("--severity", metavar="WORD", help="label severity, such as info, warning or critical")
    state = override.add_mutually_exclusive_group()
    state.add_argument("--enable", dest="enabled", action="store_true", default=None, help="evaluate the rule")
    state.add_argument("--disable", dest="enabled", action="store_false", default=None, help="do not evaluate the rule")
    restore = what.add_parser("restore", help="delete the override of a built-in rule")
    restore.add_argument("name", metavar="NAME", help="a built-in rule")
    for each in (entries, override, restore):
        client.add_arguments(each)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "list":
        entries = client.get(arguments.url, ROUTE)
        print(json.dumps(entries, indent=2) if arguments.json else table(HEADER, map(row, entries)))
        return DONE
    route = f"{ROUTE}/{urllib.parse.quote(arguments.name, safe='')}"
    if arguments.what == "override":
        entry = client.put(arguments.url, f"{route}/override", _fields(arguments))
    else:
        client.delete(arguments.url, f"{route}/override")
        entry = client.get(arguments.url, route)
    print(json.dumps(entry, indent=2) if arguments.json else table(HEADER, [row(entry)]))
    return DONE


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that are given; the daemon checks them."""
    given = {
        "level": arguments.level,
        "for": arguments.duration,
        "severity": arguments.severity,
        "enabled": arguments.enabled,
    }
    return {name: value for name, value in given.items() if value is not None}


def row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of one rule as the daemon describes it."""
    rule = entry["rule"]
    scope, value, side = rule["scope"], rule["value"], "above" if "above" in rule else "below"
    unit = UNITS.get(scope, {}).get(value, "count")
    return (
        entry["name"],
        entry["origin"],
        f"{scope} {value} {side} {readable(unit, rule[side])}" if entry["enabled"] else "disabled",
        _text("for", unit, rule.get("for", 0.0)),
        rule.get("labels", {}).get("severity", ""),
        ", ".join(_overrides(entry["overrides"], unit)),
    )


def _overrides(fields: Mapping[str, Mapping[str, Any]], unit: Unit) -> Iterator[str]:
    for name, field in fields.items():
        value, default = (_text(name, unit, field[key]) for key in ("value", "default"))
        yield f"{name} {value} ({field['origin']}; default {default})"


def _text(name: str, unit: Unit, value: Any) -> str:
    if name == "level":
        return readable(unit, value)
    return f"{value:g} s" if name == "for" else str(value).lower()
