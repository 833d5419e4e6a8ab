"""``gpumond alerts``: pending and firing alerts, or those that have been resolved."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, print_answer
from gpumond.facts.frame import Alert
from gpumond.page.runbooks import RUNBOOKS
from gpumond.view.frame import checked_as
from gpumond.view.text import moment, table

PAIRS = ("labels", "annotations")
"""Fields that are objects in the output, so that jq can name a label."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--past", action="store_true", help="show resolved alerts, most recent last")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    answer = client.get(arguments.url, "/api/v1/alerts" + ("/history" if arguments.past else ""))
    found = checked_as(tuple[Alert, ...], answer, "alerts")
    ends = {}
    if any(alert.get("silenced_by") for alert in found) and not arguments.past:
        silences = [entry["silence"] for entry in client.get(arguments.url, "/api/v1/silences")]
        ends = {silence["id"]: silence["ends_at"] for silence in silences}
    rules = sorted({alert["rule"] for alert in found} & RUNBOOKS)
    links = ["", *(_runbook(arguments.url, rule) for rule in rules)] if rules else []
    nothing = "no resolved alert" if arguments.past else "no alert is active"
    header = ("PHASE", "RULE", "SINCE", "RESOLVED", "SUMMARY")
    facts = [{**alert, **{name: dict(alert[name]) for name in PAIRS}} for alert in found]
    print_answer(arguments, facts, lambda: "\n".join((table(header, _rows(found, ends)), *links)) if found else nothing)
    return DONE


def _runbook(url: str, rule: str) -> str:
    """Return a line with the address of a runbook; over a Unix socket, with its path."""
    return f"runbook for {rule}: {'' if url.startswith('unix:') else url.rstrip('/')}/docs/runbooks/{rule}"


def _rows(alerts: Iterable[dict[str, Any]], ends: Mapping[str, float]) -> Iterator[list[str]]:
    """Yield a row for each alert. ``ends``: the unix times at which silences end, by id."""
    for alert in alerts:
        phase = alert["phase"]
        if alert.get("silenced_by") and phase != "resolved":
            until = max((ends[id] for id in alert["silenced_by"] if id in ends), default=None)
            phase += ", silenced" + (f" until {moment(until)}" if until is not None else "")
        times = (moment(alert["fired_at"] or alert["active_at"]), moment(alert["resolved_at"]))
        yield [phase, alert["rule"], *times, dict(alert["annotations"]).get("summary", "")]
