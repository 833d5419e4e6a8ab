"""``gpumond events``: starts and ends of programs, out-of-memory errors, flushes, alerts and verdicts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, count, option, print_csv
from gpumond.events import MARKS, REPEATS
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import plural
from gpumond.view.text import broken, moment, output_width, safe

POLL_SECONDS = 1.0
CAUSE_SECONDS = 5.0
"""Time between the first event of a cause and its last, as in the web UI."""
RANKS = {kind: rank for rank, kind in enumerate(MARKS)}
MOMENT_WIDTH = len(moment(0.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(
        parser,
        "-f, --follow",
        "show new events as they occur, until Ctrl-C; repeats of an out-of-memory error at most once a minute",
    )
    limit = (
        "number of past events, most recent last (default: 100); later events with the same cause are indented below "
        "the first and count as one with it"
    )
    option(parser, "--limit N", limit, type=count, default=100)
    client.add_url(parser)
    form = parser.add_mutually_exclusive_group()
    option(form, "--json", "print one JSON object per line")
    option(form, "--csv", "print past events as CSV")


def run(arguments: argparse.Namespace) -> int:
    if arguments.csv and arguments.follow:
        raise ConfigError("--csv and --follow can't be combined; --json prints one event per line")
    past = client.events(arguments.url)
    if arguments.csv:
        print_csv(past[-arguments.limit :])
        return DONE
    follower = Follower()
    _print(past, folded(past), arguments.json, arguments.limit)
    while arguments.follow:
        time.sleep(POLL_SECONDS)
        new = client.events(arguments.url, past[-1]["id"] if past else 0)
        _print(new, follower.due(new, time.monotonic()), arguments.json)
        past = new or past
    return DONE


class Follower:
    """Groups events that arrive one after the other: repeats of an out-of-memory error wait until they are due."""

    def __init__(self) -> None:
        self._due: dict[object, float] = {}
        self._waiting: list[Mapping[str, Any]] = []

    def due(self, events: Iterable[Mapping[str, Any]], now: float) -> list[list[Mapping[str, Any]]]:
        """Return the groups to print: of each cause at most one in the seconds of ``REPEATS``."""
        groups, waiting = [], []
        for group in folded([*self._waiting, *events]):
            cause = _cause(group[0])
            if now < self._due.get(cause, now):
                waiting += [each for each in group if _cause(each) == cause]
                group = [each for each in group if _cause(each) != cause]
                if group:
                    groups.append(group)
                continue
            groups.append(group)
            if seconds := REPEATS.get(group[0]["kind"]):
                self._due[cause] = now + seconds
        self._waiting = waiting
        return sorted(groups, key=lambda group: min(each["id"] for each in group))


def _print(
    events: Sequence[dict[str, Any]], groups: Sequence[Sequence[Mapping[str, Any]]], as_json: bool, most: int = 0
) -> None:
    """Print the events as JSON, else each group. ``most``: the number of events or groups; 0 is no limit."""
    lines = [json.dumps(event) for event in events] if as_json else [*map(_entry, groups)]
    for line in lines[-most:]:
        print(line if as_json else broken(line, output_width()), flush=True)


def _entry(group: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines of events with one cause, in their order: the first one, and indented the others.

    Each has its time unless the line before has it.
    """
    first = group[0]
    repeats = [each for each in group[1:] if first["kind"] in REPEATS and _cause(each) == _cause(first)]
    again = f" ({plural(len(repeats) + 1, 'time')}, the last at {moment(repeats[-1]['at'])})" if repeats else ""
    lines, before = list[str](), ""
    for each in sorted((each for each in group if each not in repeats), key=lambda each: each["id"]):
        at = moment(dict(each["details"]).get("occurred_at", each["at"]))
        line = _line(each, "" if at == before else at, "  " if lines else "")
        lines.append(line + (again if each is first else ""))
        before = at
    return "\n".join(lines)


def _line(event: Mapping[str, Any], time: str, indent: str) -> str:
    kind = indent + ("out-of-memory" if event["kind"] == "oom" else event["kind"].replace("-", " "))
    return f"{time:{MOMENT_WIDTH}}  {kind:18} {safe(event['summary'])}"


def _cause(event: Mapping[str, Any]) -> object:
    """Return what an event and its repeats have in common."""
    limit = dict(event["details"]).get("limit_bytes")
    return event["kind"], event["pid"], event["start_ticks"], event["device_uuid"], limit


def folded(events: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the events in groups, in the order of the first of each; a group's first event tells most.

    Events of one process within seconds are one group, and so are repeats of an out-of-memory error: the same process
    has run into the same limit, or has filled the same device, a short time before.
    """
    groups: list[list[Mapping[str, Any]]] = []
    newest: dict[object, list[Mapping[str, Any]]] = {}
    of_process: dict[object, list[Mapping[str, Any]]] = {}
    for event in events:
        cause, process = _cause(event), event["pid"]
        before = newest.get(cause)
        if before and event["at"] - max(each["at"] for each in before) <= REPEATS.get(event["kind"], -1):
            before.append(event)
            continue
        before = of_process.get(process)
        if process is not None and before and event["at"] - before[0]["at"] < CAUSE_SECONDS:
            before.append(event)
        else:
            groups.append([event])
            of_process[process] = groups[-1]
        newest[cause] = of_process[process]
    for group in groups:
        group.sort(key=lambda each: RANKS.get(each["kind"], len(RANKS)))
    return groups
