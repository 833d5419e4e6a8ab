"""``gpumond events``: starts and ends of programs, out-of-memory errors, flushes, alerts and verdicts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, count, option, print_csv
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import counted
from gpumond.view.text import broken, moment, output_width, safe

POLL_SECONDS = 1.0
REPEAT_SECONDS = 60.0
"""Time after an out-of-memory error within which another one of the same cause is a repeat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "-f, --follow", "show new events as they occur, until Ctrl-C")
    limit = "number of past events, most recent last (default: 100); repeats of an out-of-memory error are one line"
    option(parser, "--limit N", limit, type=count, default=100)
    client.add_url(parser)
    form = parser.add_mutually_exclusive_group()
    option(form, "--json", "print one JSON object per line")
    option(form, "--csv", "print past events as CSV")


def run(arguments: argparse.Namespace) -> int:
    if arguments.csv and arguments.follow:
        raise ConfigError("--csv and --follow can't be combined; --json prints one event a line")
    past = _after(arguments.url, 0)
    if arguments.csv:
        print_csv(past[-arguments.limit :])
        return DONE
    _print(past, arguments.json, arguments.limit)
    while arguments.follow:
        time.sleep(POLL_SECONDS)
        new = _after(arguments.url, past[-1]["id"] if past else 0)
        _print(new, arguments.json)
        past = new or past
    return DONE


def _after(url: str, last_id: int) -> list[dict[str, Any]]:
    """Return the events of the daemon after one of them, oldest first."""
    headers = {"Accept": "application/json", "Last-Event-ID": str(last_id)}
    found: list[dict[str, Any]] = client.get(url, "/api/v1/events", headers)
    return found


def _print(events: Sequence[dict[str, Any]], as_json: bool, most: int = 0) -> None:
    """Print the events, one on a line. ``most``: the number of lines, without a limit if it is 0."""
    lines = [json.dumps(event) for event in events] if as_json else [*map(_line, folded(events))]
    for line in lines[-most:]:
        print(line if as_json else broken(line, output_width()), flush=True)


def _line(group: Sequence[Mapping[str, Any]]) -> str:
    first, *more = group
    again = f" ({counted(len(more), 'more time')} until {moment(more[-1]['at'])})" if more else ""
    kind = "out-of-memory" if first["kind"] == "oom" else first["kind"].replace("-", " ")
    return f"{moment(first['at'])}  {kind:18} {safe(first['summary'])}{again}"


def folded(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events in groups, in the order of the first of each: repeats of an out-of-memory error are one group.

    It's a repeat if the same process has run into the same limit, or has filled the same device, a short time before.
    """
    groups: list[list[Mapping[str, Any]]] = []
    newest: dict[object, list[Mapping[str, Any]]] = {}
    for event in events:
        limit = dict(event["details"]).get("limit_bytes")
        cause = (event["pid"], event["start_ticks"], event["device_uuid"], limit)
        before = newest.get(cause) if event["kind"] == "oom" else None
        if before is not None and event["at"] - before[-1]["at"] <= REPEAT_SECONDS:
            before.append(event)
            continue
        groups.append([event])
        if event["kind"] == "oom":
            newest[cause] = groups[-1]
    return groups
