"""``gpumond alerts``: pending and firing alerts, or those that have been resolved."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
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
    rules = sorted({alert["rule"] for alert in found} & RUNBOOKS)
    links = ["", *(_runbook(arguments.url, rule) for rule in rules)] if rules else []
    nothing = "no resolved alert" if arguments.past else "no alert is active"
    header = ("PHASE", "RULE", "SINCE", "RESOLVED", "SUMMARY")
    facts = [{**alert, **{name: dict(alert[name]) for name in PAIRS}} for alert in found]
    print_answer(arguments, facts, lambda: "\n".join((table(header, _rows(found)), *links)) if found else nothing)
    return DONE


def _runbook(url: str, rule: str) -> str:
    """Return a line with the address of a runbook; over a Unix socket, with its path."""
    return f"runbook of {rule}: {'' if url.startswith('unix:') else url.rstrip('/')}/docs/runbooks/{rule}"


def _rows(alerts: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for alert in alerts:
        times = (moment(alert["fired_at"] or alert["active_at"]), moment(alert["resolved_at"]))
        yield [alert["phase"], alert["rule"], *times, dict(alert["annotations"]).get("summary", "")]
