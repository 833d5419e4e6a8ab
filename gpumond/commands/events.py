"""``gpumond events``: starts and ends of programs, out-of-memory errors, flushes, alerts and verdicts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, parse_count, print_csv
from gpumond.events import REPEAT_SECONDS
from gpumond.facts.errors import ConfigError
from gpumond.view.events import group_events, group_text, repeat_key
from gpumond.view.text import output_width, wrap_text

POLL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "-f, --follow",
        "show new events as they occur, until Ctrl-C; repeats of an out-of-memory error at most once a minute",
    )
    limit = (
        "number of past events, most recent last (default: 100); an event and its consequences, which are "
        "indented below it, count as one"
    )
    add_option(parser, "--limit N", limit, type=parse_count, default=100)
    client.add_url(parser)
    form = parser.add_mutually_exclusive_group()
    add_option(form, "--json", "print one JSON object per line")
    add_option(form, "--csv", "print past events as CSV")


def run(arguments: argparse.Namespace) -> int:
    if arguments.csv and arguments.follow:
        raise ConfigError("--csv and --follow can't be combined; --json prints one event per line")
    events = client.events(arguments.url)
    if arguments.csv:
        print_csv(events[-arguments.limit :])
        return DONE
    follower = Follower()
    _print_events(events, group_events(events), arguments.json, arguments.limit)
    while arguments.follow:
        time.sleep(POLL_SECONDS)
        new = client.events(arguments.url, events[-1]["id"] if events else 0)
        _print_events(new, follower.due(new, time.monotonic()), arguments.json)
        events = new or events
    return DONE


class Follower:
    """Groups events that arrive one after the other: repeats of an out-of-memory error wait until they are due."""

    def __init__(self) -> None:
        self._due: dict[object, float] = {}
        self._waiting: list[Mapping[str, Any]] = []

    def due(self, events: Iterable[Mapping[str, Any]], now: float) -> list[list[Mapping[str, Any]]]:
        """Return the groups to print: of each cause at most one in the seconds of ``REPEAT_SECONDS``."""
        groups, waiting = [], []
        for group in group_events([*self._waiting, *events]):
            key = repeat_key(group[0])
            if now < self._due.get(key, now):
                waiting += group
                continue
            groups.append(group)
            if seconds := REPEAT_SECONDS.get(group[0]["kind"]):
                self._due[key] = now + seconds
        self._waiting = waiting
        return sorted(groups, key=lambda group: min(each["id"] for each in group))


def _print_events(
    events: Sequence[dict[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], as_json: bool, limit: int = 0
) -> None:
    """Print the events as JSON, else each group. ``limit``: the number of events or groups; 0 is no limit."""
    lines = [json.dumps(event) for event in events] if as_json else [*map(group_text, groups)]
    for line in lines[-limit:]:
        print(line if as_json else wrap_text(line, output_width()), flush=True)
