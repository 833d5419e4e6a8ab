"""``gpumond fleet``: list the daemons of several machines, show their state and use, and flush programs on them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gpumond.cli.arguments import DONE, NOTHING_TO_DO, print_result
from gpumond.features.fleet import advise, audit, discovery, doctor, flush, report, status, top, undo
from gpumond.view.text import table

FLUSH_COMMANDS = {
    "flush": "flush programs on several machines and print receipts",
    "sleep": "release serving engines' memory and print receipts",
    "wake": "wake serving engines: undo each one's last release of memory",
}
READ_COMMANDS = {
    "targets": "print the daemons' addresses; with --json, in file_sd format",
    "status": "show each machine's state, and which machines don't respond",
    "top": "show the GPUs and processes of several machines live in one table",
    "doctor": "list problems on all machines, each with a remedy",
    "audit": "show audit-log entries of several machines",
}

ADD_OWN_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "status": status.add_arguments,
    "top": top.add_arguments,
    "audit": audit.add_arguments,
}
"""What adds the options that only this command has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*READ_COMMANDS, *FLUSH_COMMANDS, "undo", "report", "advise")
    subparsers = parser.add_subparsers(dest="what", metavar="|".join(names), required=True)
    for name, summary in READ_COMMANDS.items():
        read = subparsers.add_parser(name, help=summary)
        discovery.add_arguments(read)
        if name in ADD_OWN_ARGUMENTS:
            ADD_OWN_ARGUMENTS[name](read)
    for name, summary in FLUSH_COMMANDS.items():
        flush.add_arguments(subparsers.add_parser(name, help=summary), name)
    summary = "undo what a `gpumond fleet` command changed, where possible"
    undo.add_arguments(subparsers.add_parser("undo", help=summary))
    summary = "report how much memory was used and wasted, based on Prometheus' data"
    report.add_arguments(subparsers.add_parser("report", help=summary))
    summary = "propose limits, reserves and MIG profiles for programs, based on Prometheus' data"
    advise.add_arguments(subparsers.add_parser("advise", help=summary))


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "top":
        return top.run(arguments)  # it blocks, and starts an event loop for each request
    actions: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, int]]] = {
        "targets": _print_targets,
        "status": status.run,
        "doctor": doctor.run,
        "audit": audit.run,
        "undo": undo.run,
        "report": report.run,
        "advise": advise.run,
        **dict.fromkeys(FLUSH_COMMANDS, flush.run),
    }
    return asyncio.run(actions[arguments.what](arguments))


async def _print_targets(arguments: argparse.Namespace) -> int:
    _, machines = await discovery.select_machines(arguments)
    rows = ((each.name, each.url, ", ".join(map("=".join, each.labels))) for each in machines)
    print_result(arguments, discovery.file_sd_groups(machines), lambda: table(("MACHINE", "ADDRESS", "LABELS"), rows))
    return DONE if machines else NOTHING_TO_DO
