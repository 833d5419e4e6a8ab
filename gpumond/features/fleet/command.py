"""``gpumond fleet``: list the daemons of several machines, show their state and use, and flush programs on them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gpumond.cli.arguments import DONE, NOTHING_TO_DO, print_result
from gpumond.features.fleet import advise, audit, discovery, doctor, flush, report, status, top, undo
from gpumond.view.text import table

FLUSHES = {
    "flush": "flush programs on several machines and print receipts",
    "sleep": "release serving engines' memory and print receipts",
    "wake": "wake serving engines: undo each one's last release of memory",
}
READS = {
    "targets": "print the daemons' addresses; with --json, in file_sd format",
    "status": "show each machine's state, and which machines don't respond",
    "top": "show the GPUs and processes of several machines live in one table",
    "doctor": "list problems on all machines, each with a remedy",
    "audit": "show audit-log entries of several machines",
}

OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "status": status.add_arguments,
    "top": top.add_arguments,
    "audit": audit.add_arguments,
}
"""Functions that add options of a command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*READS, *FLUSHES, "undo", "report", "advise")
    what = parser.add_subparsers(dest="what", metavar="|".join(names), required=True)
    for name, summary in READS.items():
        read = what.add_parser(name, help=summary)
        discovery.add_arguments(read)
        if name in OPTIONS:
            OPTIONS[name](read)
    for name, summary in FLUSHES.items():
        flush.add_arguments(what.add_parser(name, help=summary), name)
    undone = what.add_parser("undo", help="undo what a `gpumond fleet` command changed, where possible")
    discovery.add_arguments(undone)
    undo.add_arguments(undone)
    report.add_arguments(
        what.add_parser("report", help="report how much memory was used and wasted, based on Prometheus' data")
    )
    advise.add_arguments(
        what.add_parser(
            "advise", help="propose limits, reserves and MIG profiles for programs, based on Prometheus' data"
        )
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "top":
        return top.run(arguments)  # it blocks, and starts an event loop for each request
    actions: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, int]]] = {
        "targets": _targets,
        "status": status.run,
        "doctor": doctor.run,
        "audit": audit.run,
        "undo": undo.run,
        "report": report.run,
        "advise": advise.run,
        **dict.fromkeys(FLUSHES, flush.run),
    }
    return asyncio.run(actions[arguments.what](arguments))


async def _targets(arguments: argparse.Namespace) -> int:
    _, machines = await discovery.select_machines(arguments)
    rows = ((each.name, each.url, ", ".join(map("=".join, each.labels))) for each in machines)
    print_result(arguments, discovery.to_groups(machines), lambda: table(("MACHINE", "ADDRESS", "LABELS"), rows))
    return DONE if machines else NOTHING_TO_DO
