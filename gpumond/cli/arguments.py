"""What commands share: values of options in one syntax, exit codes, and messages on standard error."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from gpumond.facts import units
from gpumond.facts.errors import ConfigError, GpumondError
from gpumond.view.text import printable

DONE, FAILED, WRONG_USE, NOTHING_TO_DO = 0, 1, 2, 3


def print_error(message: str) -> None:
    """Print a message to standard error. It may contain text of a daemon: no character of it changes the terminal."""
    print("\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)


def confirm(question: str, refusal: str) -> None:
    """Ask a question. Raises GpumondError with the text ``otherwise`` unless the answer is yes, and ConfigError if
    standard input ends without an answer.
    """
    print(f"\n{question} [y/N] ", end="", flush=True)
    answer = sys.stdin.readline()
    if answer.strip().lower() in ("y", "yes"):
        return
    if answer:
        raise GpumondError(refusal)
    print()
    raise ConfigError(f"{refusal}: standard input ended without an answer; pass --yes to skip the confirmation")


def print_result(arguments: argparse.Namespace, result: object, text: Callable[[], str]) -> None:
    """Print an answer as JSON with ``--json``, a list as CSV with ``--csv``, else as text."""
    if getattr(arguments, "csv", False):
        print_csv(cast("Sequence[Mapping[str, object]]", result))
    else:
        print(json.dumps(result, indent=2) if arguments.json else text())


def print_csv(entries: Sequence[Mapping[str, object]]) -> None:
    """Print entries as CSV: times in ISO 8601, unknown values empty, and lists and objects as JSON."""
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(name, entry.get(name)) for name in names] for entry in entries)


def _csv_cell(name: str, value: object) -> object:
    if isinstance(value, (int, float)) and (name in ("at", "since") or name.endswith("_at")):
        return datetime.fromtimestamp(value, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(value) if isinstance(value, (list, tuple, dict, bool)) else value


REQUEST_KEY = re.compile(r"(?:body|query)\.(?:target\.)?([a-z_]+?)(_seconds|_bytes)?: ")


def with_typed_option(error: Exception, arguments: argparse.Namespace) -> str:
    """Return an error with the option that was typed instead of the key of the request."""
    match = REQUEST_KEY.match(str(error))
    option = f"--{match[1].replace('_', '-')}" if match else ""
    is_typed = option in [word.partition("=")[0] for word in arguments.words]
    if not (match and is_typed):
        return str(error)
    problem = str(error)[len(match[0]) :]
    if match[2] == "_seconds":
        problem = re.sub(r"[\d.]+(?:e\+\d+)?$", lambda bound: units.duration_text(float(bound[0])), problem)
    return f"{option}: {problem}"


T = TypeVar("T")


def option_type(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return the type of an option from a function that raises ValueError."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r:.80}: {error}") from None

    return parse


def positive_type(read: Callable[[str], float]) -> Callable[[str], float]:
    """Return the type of an option that is more than 0."""

    def parse(text: str) -> float:
        value = read(text)
        if value <= 0:
            raise ValueError("must be above 0")
        return value

    return option_type(parse)


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError("must be a whole number above 0")
    return int(text)


def _converted(convert: Callable[[str], T], expected: str) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            return convert(text)
        except ValueError:
            raise ValueError(f"expected {expected}") from None

    return option_type(read)


parse_whole_number = _converted(int, "a whole number")
parse_number = _converted(float, "a number")
parse_count = option_type(_parse_count)
"""A number of lines or entries, at least 1."""
parse_duration = option_type(units.parse_seconds_argument)
"""A duration such as ``90s`` or ``1h30m``, in seconds."""


def parse_time_argument(text: str, now: float | None = None, in_future: bool = False) -> float:
    """Convert a time that a user types to Unix time: ISO 8601 (UTC unless it has an offset), the last ``HH:MM``, or how
    long ago, such as ``5m``. ``in_future``: the next ``HH:MM``, or a delay. Raises ValueError.
    """
    now = time.time() if now is None else now
    with suppress(ValueError):
        return now + units.parse_seconds_argument(text) * (1 if in_future else -1)
    today = datetime.fromtimestamp(now, timezone.utc)
    is_clock = ":" in text and "-" not in text
    text = re.sub(r"\.(\d{1,6})", lambda fraction: f".{fraction[1]:0<6}", text)  # as Python 3.10 requires it
    try:
        at = datetime.fromisoformat(f"{today:%Y-%m-%d} " * is_clock + text.replace("Z", "+00:00"))
    except ValueError:
        distance = "a delay" if in_future else "how long ago"
        raise ValueError(f"expected HH:MM, a time such as 2026-11-01T08:00, or {distance}, such as 5m") from None
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    if is_clock and in_future != (at > today):
        at += timedelta(days=1 if in_future else -1)
    return at.timestamp()


def explain_columns(parser: argparse.ArgumentParser, meanings: Mapping[str, str]) -> None:
    """Add a section with the meanings of the table's columns to a command's help."""
    lines = (
        textwrap.fill(f"{name.upper():13}{meaning}", 79, subsequent_indent=13 * " ")
        for name, meaning in meanings.items()
    )
    parser.add_argument_group("columns", "\n".join(lines))


def add_option(parser: argparse._ActionsContainer, usage: str, help: str, **settings: Any) -> None:
    """Add an option as usage shows it: ``-n, --limit N`` has a value; ``--json`` without choices is a switch."""
    *aliases, option = usage.split(", ")
    name, _, metavar = option.partition(" ")
    if metavar:
        settings["metavar"] = metavar
    elif "choices" not in settings:
        settings.setdefault("action", "store_true")
    parser.add_argument(*aliases, name, help=help, **settings)


class SelectTarget(argparse.Action):
    """Selects a workload by its name, or a process by its pid."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values is not None:
            is_pid = values.isascii() and values.isdecimal()
            if is_pid and not int(values):
                raise argparse.ArgumentError(self, f"{values!r}: a pid is above 0")
            setattr(namespace, "pid" if is_pid else "workload", int(values) if is_pid else values)


def add_target(parser: argparse.ArgumentParser, purpose: str, device: bool = True) -> argparse._ActionsContainer:
    """Add the options that select programs, of which one is required, and return their group.

    ``purpose``: what happens to a selected program, such as ``flush``. ``device``: add the option for a device.
    """
    target = parser.add_mutually_exclusive_group(required=device)
    target.add_argument(
        "selected",
        nargs="?",
        action=SelectTarget,
        metavar="NAME",
        help=f"{purpose} a workload by its name, or a process by its pid",
    )
    add_option(target, "--pid PID", f"{purpose} one process", type=parse_count)
    if device:
        add_option(
            target,
            "--device GPU",
            f"{purpose} every process with an agent on one GPU: index, UUID or its prefix, or PCI address",
        )
    add_option(target, "--workload NAME", f"{purpose} every process of one workload")
    return target


def parse_address(text: str) -> str:
    """Return the address of a daemon. ``HOST:PORT`` and ``:PORT`` are over HTTP. Raises ArgumentTypeError."""
    url = text if "://" in text else f"http://{'127.0.0.1' if text.startswith(':') else ''}{text}"
    if not url.startswith(("http://", "https://", "unix:///")) or not _has_valid_host(url):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80}: expected HOST:PORT, an http:// or https:// address, or unix:///DIRECTORY/api.sock"
        )
    return url


def _has_valid_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "unix" or (bool(parts.hostname) and parts.port != 0)
    except ValueError:  # of the port, or of an IPv6 address
        return False
