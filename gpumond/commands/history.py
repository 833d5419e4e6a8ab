"""``gpumond history``: past shares of GPUs and programs over time, at one time, or the change between two times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import urlencode

from gpumond.cli import client
from gpumond.cli.arguments import (
    DONE,
    NOTHING_TO_DO,
    add_option,
    explain_columns,
    option_type,
    parse_time_argument,
    positive_type,
    print_error,
    print_result,
)
from gpumond.events import END_EVENT
from gpumond.facts import units
from gpumond.facts.errors import LIST_PROGRAMS_HINT, ConfigError, DaemonError, GpumondError, did_you_mean
from gpumond.facts.shares import SHARE_MEANINGS, SHARES
from gpumond.view.moments import (
    VALUES,
    Entry,
    history_table,
    holdings_at,
    known_shares,
    rounded_bytes,
    share_columns,
    table_at,
)
from gpumond.view.text import exact_time_text, output_width, size_or_dash, time_text

ROUTE = "/api/v1/history"
DEFAULT_LAST_SECONDS = 900.0
DEFAULT_ROWS = 15
"""Rows that the table has for each GPU or program, unless others are asked for."""
MIN_EVERY_SECONDS = 1.0
"""Least time between two rows, whose times are in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = "a workload's name or a process's pid (default: all GPUs together; with --at: every program)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=name)
    add_option(parser, "--device GPU", "only one GPU: index, UUID or its prefix, or PCI address")
    seconds: dict[str, Any] = {"type": positive_type(units.parse_seconds_argument), "metavar": "DURATION"}
    add_option(parser, "--last DURATION", "length of the period to show, at most a day (default: 15m)", **seconds)
    every = (
        "time between two rows; PEAK is the highest use until the next row (default: --last / "
        f"{DEFAULT_ROWS}; with --json or --csv: every value that is kept)"
    )
    add_option(parser, "--every DURATION", every, **seconds)
    form = parser.add_mutually_exclusive_group()
    add_option(
        form,
        "--until TIME",
        "end of the period to show, written as for --at (default: now)",
        type=option_type(parse_past_time),
    )
    add_option(
        form,
        "--at TIME",
        "show each program's use at this time: HH:MM or ISO 8601 (UTC unless it has an offset), how long ago, such "
        "as 5m, or now; pass --at twice to show the change between two times",
        type=option_type(parse_past_time),
        action="append",
        default=[],
    )
    client.add_arguments(parser, entries="values")
    explain_columns(parser, {share: SHARE_MEANINGS[share] for share in SHARES})


def parse_past_time(text: str, now: float | None = None) -> float:
    """Convert a time that a user types, at most ``now``, to Unix time. Raises ValueError.

    One that is stated as how long ago has whole seconds, as the table shows it.
    """
    now = time.time() if now is None else now
    at = parse_time_argument("0s" if text == "now" else text, float(int(now)))
    if at > now:
        raise ValueError("must not be in the future")
    return at


def run(arguments: argparse.Namespace) -> int:
    if arguments.at and (arguments.last or arguments.every):
        raise ConfigError(
            "--at can't be combined with --last or --every; for a range that ends at TIME, pass --until TIME "
            "instead of --at TIME"
        )
    arguments.last = arguments.last or DEFAULT_LAST_SECONDS
    if arguments.last > units.DAY_SECONDS:
        raise ConfigError("--last: the daemon keeps one day of history; pass at most 24h")
    if arguments.every is not None and arguments.every < MIN_EVERY_SECONDS:
        raise ConfigError("--every: must be at least 1s; without it, --csv and --json print every value that is kept")
    if len(arguments.at) > 2:
        raise ConfigError("--at: pass one time, or two to compare them")
    gpus = {each["uuid"]: str(each["index"]) for each in client.get(arguments.url, "/api/v1/devices")}
    uuid = None if arguments.device is None else client.resolve_device_uuid(arguments.url, arguments.device)
    if not arguments.at:
        try:
            entries = _period_entries(arguments, uuid, gpus)
        except NothingToShow as error:
            print_error(f"gpumond: {error}")
            return NOTHING_TO_DO
        print_result(arguments, entries, lambda: _period_table(entries, gpus))
        return DONE
    get = partial(client.get, arguments.url)
    moments = [holdings_at(get, at, uuid, arguments.names) for at in sorted(arguments.at)]
    entries = [entry for entries in moments for entry in entries]
    print_result(
        arguments,
        entries,
        lambda: table_at([*map(exact_time_text, sorted(arguments.at))], moments, gpus, output_width()),
    )
    return DONE


class NothingToShow(GpumondError):
    """No program matches."""


class Subject(NamedTuple):
    """The machine, a device, or a process on it."""

    device_uuid: str | None
    pid: int | None = None
    start_ticks: int | None = None
    name: str = ""


def _period_entries(arguments: argparse.Namespace, uuid: str | None, gpus: Mapping[str, str]) -> list[Entry]:
    """Return an entry for each time and subject, oldest first."""
    every_seconds = arguments.every or (
        None if arguments.json or arguments.csv else max(MIN_EVERY_SECONDS, arguments.last / DEFAULT_ROWS)
    )
    since = (arguments.until or time.time()) - arguments.last
    entries = [
        entry
        for subject in _subjects(arguments, uuid, gpus, since)
        for entry in _first_of_intervals(_share_entries(arguments.url, subject, since, arguments.until), every_seconds)
    ]
    if not entries and arguments.names:
        raise NothingToShow(f"no history for {' or '.join(arguments.names)}{LIST_PROGRAMS_HINT}")
    return sorted(entries, key=lambda entry: entry["at"])


def _subjects(
    arguments: argparse.Namespace, uuid: str | None, gpus: Mapping[str, str], since: float
) -> Iterator[Subject]:
    """Yield what the arguments select: processes that run, or that have ended since a time."""
    if not arguments.names:
        yield Subject(uuid)
        return
    running = client.frame(arguments.url)["processes"]
    ended = [each for each in client.events(arguments.url) if each["kind"] == END_EVENT and each["at"] >= since]
    candidates = dict.fromkeys(
        Subject(each["device_uuid"], each["pid"], each["start_ticks"], each["workload"] or each.get("comm") or "")
        for each in (*ended, *running)
        if uuid in (None, each["device_uuid"])
    )
    for name in arguments.names:
        matching = [each for each in candidates if name in (str(each.pid), each.name)]
        yield from matching
        if name.isdecimal() and not matching:
            yield from (Subject(each, int(name)) for each in gpus if uuid in (None, each))
        elif not matching:
            hint = did_you_mean(name, (each.name for each in candidates))
            started = client.get(arguments.url, "/api/v1/status")["started_at"]
            known_since = "the daemon's start" if started >= since else time_text(since)
            remedy = hint or (LIST_PROGRAMS_HINT if started >= since else "; choose a longer --last")
            raise NothingToShow(f"no program named {name} has used GPU memory since {known_since}{remedy}")


def _share_entries(url: str, subject: Subject, since: float, until: float | None) -> list[Entry]:
    """Return the shares of a subject between two times, oldest first; none if it has no history."""
    query = {"uuid": subject.device_uuid, "pid": subject.pid, "start_ticks": subject.start_ticks, "until": until}
    parameters = urlencode({name: each for name, each in query.items() if each is not None} | {"since": since})
    try:
        columns = client.get(url, f"{ROUTE}/shares?{parameters}")
    except DaemonError as error:
        if error.status != client.NOT_FOUND:
            raise
        return []
    names = {"high": "peak", **{name: name for name in VALUES}}
    return [
        _with_overcount(
            {"at": at, **subject._asdict()}
            | {f"{names[name]}_bytes": rounded_bytes(columns[name][index]) for name in ("used", "high", *SHARES)}
        )
        for index, at in enumerate(columns["at"])
    ]


def _with_overcount(entry: Entry) -> Entry:
    """Add the overcount: the shares add up to the used bytes and the overcount."""
    shares = [size for share in SHARES if (size := entry[f"{share}_bytes"]) is not None]
    used = entry["used_bytes"]
    return entry | {"overcount_bytes": None if used is None or not shares else max(0, sum(shares) - used)}


def _first_of_intervals(entries: Sequence[Entry], every_seconds: float | None) -> Iterator[Entry]:
    """Yield the first entry of each interval, with the peak of the whole interval."""
    if every_seconds is None:
        yield from entries
        return
    for _, group in groupby(entries, key=lambda entry: entry["at"] // every_seconds):
        first, *others = group
        yield first | {"peak_bytes": max(entry["peak_bytes"] for entry in (first, *others))}


def _period_table(entries: Sequence[Entry], gpus: Mapping[str, str]) -> str:
    if not entries:
        return "nothing is known about that time"
    programs = any(entry["pid"] for entry in entries)
    header = (">TIME", "GPU", *((">PID", "PROGRAM") if programs else ()), ">USED", ">PEAK", *share_columns(entries))
    rows = [
        [
            time_text(entry["at"]),
            gpus.get(entry["device_uuid"], "-") if entry["device_uuid"] else "all",
            *((str(entry["pid"]), entry["name"] or "-") if programs else ()),
            size_or_dash(entry["used_bytes"]),
            size_or_dash(entry["peak_bytes"]),
            *(size_or_dash(entry[f"{share}_bytes"]) for share in known_shares(entries)),
        ]
        for entry in entries
    ]
    return history_table(header, rows, output_width())
