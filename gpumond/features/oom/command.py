"""``gpumond oom``: cases of out-of-memory errors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, NOTHING_TO_DO, add_option, option_type, parse_count, print_error, print_result
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.features.oom.case import CaseSummary, RankedCase, html_document, terminal_text
from gpumond.view import html_report
from gpumond.view.frame import checked_as
from gpumond.view.text import output_width, size_or_dash, table, time_text

OOM_ROUTE = "/api/v1/oom"


NO_CASE = "no out-of-memory error is recorded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        type=option_type(_check_subcommand),
        choices=("list", "show"),
        default="list",
        help="list (default): all recorded errors (cases); show: one case with its remedies",
    )
    parser.add_argument("id", nargs="?", default="last", metavar="ID", help="the case's ID, or `last` (default)")
    add_option(parser, "--pid PID", "only this process's cases", type=parse_count)
    add_option(parser, "--html FILE", "write the case to an HTML file, and print nothing", type=Path)
    client.add_arguments(parser)


def _check_subcommand(text: str) -> str:
    """Refuse a case's id, or a pid, in place of the subcommand. Raises ValueError."""
    if text[:1].isdecimal():
        target = f"--pid {text}" if text.isdecimal() else text
        raise ValueError(f"expected list or show; did you mean gpumond oom show {target}?")
    return text


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "list" and arguments.html is None:
        return _list(arguments)
    html_report.check_report_path(arguments.html)
    if not re.fullmatch("[0-9]{1,12}-[0-9]{1,20}-[0-9]{1,12}|last", arguments.id):
        raise ConfigError(f"{arguments.id!r:.80} isn't a case's ID; to list the cases: gpumond oom")
    id = arguments.id
    if id == "last":
        cases = _cases(arguments)
        if not cases:
            print_error(f"gpumond: {_no_case(arguments)}")
            return NOTHING_TO_DO
        id = cases[-1]["id"]
    answer = client.get(arguments.url, f"{OOM_ROUTE}/{id}")
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return DONE
    ranked = _decode(answer)
    if arguments.html is not None:
        html_report.write_report(arguments.html, html_document(ranked.case, ranked.ranks))
    else:
        print(client.with_commands(terminal_text(ranked.case, ranked.ranks, output_width()), arguments.url))
    return DONE


def _list(arguments: argparse.Namespace) -> int:
    cases = _cases(arguments)
    header = ("CASE", "TIME", "PROGRAM", ">ERRORS", ">MISSING", "FIRST REMEDY")
    rows = [
        [
            each["id"],
            time_text(each["at"]),
            each["workload"] or "-",
            str(each["errors"]),
            size_or_dash(each["missing_bytes"]),
            client.with_commands(each["remedy"], arguments.url) or "-",
        ]
        for each in cases
    ]
    print_result(arguments, cases, lambda: table(header, rows) if rows else _no_case(arguments))
    return DONE


def _cases(arguments: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Return the cases of the process that is asked for, or all, the newest last."""
    known = checked_as(tuple[CaseSummary, ...], client.get(arguments.url, OOM_ROUTE), "cases")
    return [each for each in known if arguments.pid in (None, each["pid"])]


def _no_case(arguments: argparse.Namespace) -> str:
    return NO_CASE if arguments.pid is None else f"no out-of-memory error of pid {arguments.pid} is recorded"


def _decode(answer: object) -> RankedCase:
    """Return the case of an answer. Raises DaemonError."""
    from pydantic import TypeAdapter, ValidationError  # needed for one case only

    try:
        return TypeAdapter(RankedCase).validate_python(answer)
    except ValidationError as error:
        raise DaemonError(f"the daemon's response isn't a case: {error.errors()[0]['msg']}") from None
