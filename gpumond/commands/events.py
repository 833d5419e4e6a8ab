"""``gpumond events``: starts and ends of programs, out-of-memory errors, flushes, alerts and verdicts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, count, option, print_csv
from gpumond.facts.errors import ConfigError
from gpumond.view.text import broken, moment, output_width, safe

POLL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "-f, --follow", "show new events as they occur, until Ctrl-C")
    option(parser, "--limit N", "number of past events, most recent last (default: 100)", type=count, default=100)
    client.add_url(parser)
    form = parser.add_mutually_exclusive_group()
    option(form, "--json", "print one JSON object per line")
    option(form, "--csv", "print past events as CSV")


def run(arguments: argparse.Namespace) -> int:
    past = _after(arguments.url, 0)[-arguments.limit :]
    if arguments.csv:
        if arguments.follow:
            raise ConfigError("--csv and --follow exclude each other; --json prints one event a line")
        print_csv(past)
        return DONE
    last = _print(past, arguments.json)
    while arguments.follow:
        time.sleep(POLL_SECONDS)
        last = _print(_after(arguments.url, last), arguments.json, last)
    return DONE


def _after(url: str, last_id: int) -> list[dict[str, Any]]:
    """Return the events of the daemon after one of them, oldest first."""
    headers = {"Accept": "application/json", "Last-Event-ID": str(last_id)}
    found: list[dict[str, Any]] = client.get(url, "/api/v1/events", headers)
    return found


def _print(events: Iterable[dict[str, Any]], as_json: bool, last: int = 0) -> int:
    """Print the events. Returns the identifier of the last one."""
    for event in events:
        last = event["id"]
        line = f"{moment(event['at'])}  {event['kind'].replace('-', ' '):18} {safe(event['summary'])}"
        print(json.dumps(event) if as_json else broken(line, output_width()), flush=True)
    return last
