"""``gpumond fleet``: list the daemons of several machines, show their state and use, and flush programs on them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpumond.cli.exits import DONE, FAILED, NOTHING_TO_DO
from gpumond.facts.units import counted
from gpumond.features.fleet.commands import (
    doctor as fleet_doctor,
    flush as fleet_flush,
    machines as fleet_machines,
    report as fleet_report,
    top as fleet_top,
)
from gpumond.features.fleet.commands.machines import chosen, listed, make_client, make_prometheus, progress
from gpumond.features.fleet.discovery import to_groups
from gpumond.features.fleet.status import MachineStatus, statuses
from gpumond.view.text import safe, size, table

GC_THRESHOLDS = (100_000, 20, 20)
"""Thresholds of the garbage collection. The frames of thousands of machines have many objects, and no cycle."""
FLUSHES = {
    "flush": "flush programs on several machines, and print receipts",
    "sleep": "release the memory of declared serving engines, and print receipts",
    "wake": "undo the last release of declared serving engines",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ("targets", "status", "top", "doctor", *FLUSHES, "report")
    what = parser.add_subparsers(dest="what", metavar="|".join(names), required=True)
    targets = what.add_parser("targets", help="print the addresses of the daemons; with --json in file_sd format")
    status = what.add_parser("status", help="show the state of each machine, and machines that do not answer")
    top = what.add_parser("top", help="show the devices and processes of several machines live in one table")
    doctor = what.add_parser("doctor", help="print the problems of the machines, with a remedy for each")
    for each in (targets, status, top, doctor):
        fleet_machines.add_arguments(each)
    fleet_top.add_arguments(top)
    for name, summary in FLUSHES.items():
        fleet_flush.add_arguments(what.add_parser(name, help=summary), name)
    report = what.add_parser("report", help="show the memory that was held without use, from Prometheus")
    fleet_report.add_arguments(report)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "top":
        return fleet_top.run(arguments)  # it blocks, and starts an event loop for each request
    actions: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, int]]] = {
        "targets": _targets,
        "status": _status,
        "doctor": fleet_doctor.run,
        "report": fleet_report.run,
        **dict.fromkeys(FLUSHES, fleet_flush.run),
    }
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        return asyncio.run(actions[arguments.what](arguments))
    finally:
        gc.set_threshold(*thresholds)


async def _targets(arguments: argparse.Namespace) -> int:
    client = make_client(arguments)
    machines = await listed(arguments, client, make_prometheus(arguments))
    found = chosen(arguments, machines.all)
    if arguments.json:
        print(json.dumps(to_groups(found), indent=2))
    else:
        rows = ((each.name, each.url, ", ".join(map("=".join, each.labels))) for each in found)
        print(table(("MACHINE", "ADDRESS", "LABELS"), rows))
    return DONE if found else NOTHING_TO_DO


async def _status(arguments: argparse.Namespace) -> int:
    client = make_client(arguments)
    machines = await listed(arguments, client, make_prometheus(arguments))
    found = chosen(arguments, machines.all)
    with progress(len(found), "machines read") as done:
        states = await statuses(client, found, arguments.parallel, done)
    if arguments.json:
        print(json.dumps([asdict(state) for state in states], indent=2))
    else:
        print("\n\n".join(filter(None, (status_table(states), missing(states), summary(states)))))
    if not states:
        return NOTHING_TO_DO
    return FAILED if any(state.problem for state in states) else DONE


def status_table(states: Sequence[MachineStatus]) -> str:
    """Return a table of the machines that answer; empty without one."""
    header = ("MACHINE", "VERSION", "DRIVER", ">GPUS", ">SIZE", ">USED", ">RETURNABLE", ">AGENTS", "FAULTS", "ALERTS")
    rows = [[*_row(state)] for state in states if not state.problem]
    return table(header, rows) if rows else ""


def missing(states: Sequence[MachineStatus]) -> str:
    """Return a line for each machine that does not answer, with the reason."""
    return "\n".join(safe(f"missing {each.machine} ({each.url}): {each.problem}") for each in states if each.problem)


def summary(states: Sequence[MachineStatus]) -> str:
    """Return totals: the machines that answer, the programs with an agent, and the versions."""
    known = [state for state in states if not state.problem]
    if not states:
        return "no machine is listed"
    programs, agents = (sum(getattr(state, name) or 0 for state in known) for name in ("programs", "agents"))
    versions = Counter(state.version for state in known).most_common()
    parts = [f"{len(known)} of {counted(len(states), 'machine')} answer"]
    if programs:
        parts.append(f"{agents} of {counted(programs, 'program')} have an agent")
    if len(versions) > 1:
        parts.append("versions " + ", ".join(f"{version} ({number})" for version, number in versions))
    return safe("; ".join(parts))


def _row(state: MachineStatus) -> Iterator[str]:
    up = "" if state.devices == state.devices_up else f"{state.devices_up} of "
    yield from (state.machine, state.version or "-", state.driver_version or "-", f"{up}{state.devices}")
    yield from (size(state.size_bytes), size(state.used_bytes), size(state.returnable_bytes))
    yield f"{state.agents} of {state.programs}"
    yield from (_counts(state.faults), _counts(state.alerts))


def _counts(names: Mapping[str, int] | None) -> str:
    numbered = (name if number == 1 else f"{name} ({number})" for name, number in (names or {}).items())
    return ", ".join(numbered) or "-"
