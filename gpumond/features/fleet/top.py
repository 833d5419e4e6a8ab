"""``gpumond fleet top``: show the GPUs and processes of several machines live in one table, or one frame as text."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.features.fleet.connection import Client, Machine
from gpumond.features.fleet.discovery import read_frames, select_machines, unread_machines
from gpumond.view.frame import CheckedFrame, FrameView, frame_of, frame_view, merge_views
from gpumond.view.tables import status_page
from gpumond.view.text import printable_excerpt

MAX_MACHINES = 64
"""Machines that are shown at a time; each is read every second."""
NAME_WIDTH = 30


class MachineClient:
    """Requests to one machine, each with an event loop of its own, since they are made in threads."""

    def __init__(self, client: Client, machine: Machine) -> None:
        self.url = self.reached = machine.url
        self._client, self._machine = client, machine

    def frame(self) -> CheckedFrame:
        return asyncio.run(self._client.frame(self._machine, frame_of))

    def get(self, path: str) -> Any:
        return asyncio.run(self._client.get(self._machine, path))

    def post(self, path: str, body: object, timeout: float) -> Any:
        return asyncio.run(self._client.post(self._machine, path, body, timeout))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--once", "print the table (or, with --json, JSON) once and exit")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.once:
        raise ConfigError("--json requires --once")
    if not arguments.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("standard input or output isn't a terminal; for scripts, run gpumond fleet top --once")
    client, machines = asyncio.run(select_machines(arguments))
    if len(machines) > MAX_MACHINES:
        raise ConfigError(f"{len(machines)} machines are listed; select at most {MAX_MACHINES} with --machine")
    if not machines:
        print("gpumond: no machine is listed, or none matches --machine and --label", file=sys.stderr)
        return NOTHING_TO_DO
    if arguments.once:
        return asyncio.run(_print_once(arguments, client, machines))
    _show(client, machines)
    return DONE


def _show(client: Client, machines: Sequence[Machine]) -> None:
    from gpumond.top.app import TopApp  # not needed for --once

    top = TopApp([MachineClient(client, machine) for machine in machines])
    for connection, machine in zip(top.connections, machines, strict=True):
        connection.name = printable_excerpt(machine.name, NAME_WIDTH)
    top.run()


async def _print_once(arguments: argparse.Namespace, client: Client, machines: Sequence[Machine]) -> int:
    def convert(_: Machine, answer: object) -> tuple[CheckedFrame, FrameView]:
        frame = frame_of(answer)
        return frame, frame_view(frame)

    answers = await read_frames(client, machines, convert, arguments.parallel)
    answered = [*zip(machines, answers, strict=True)]
    unread = unread_machines(machines, answers)
    if arguments.json:
        print(json.dumps([_json_entry(machine, answer) for machine, answer in answered], indent=2))
    else:
        views = [
            (printable_excerpt(each.name, NAME_WIDTH), answer[1])
            for each, answer in answered
            if isinstance(answer, tuple)
        ]
        lines = "\n".join(map(str, unread))
        print("\n\n".join(filter(None, (status_page(merge_views(views), one_line=True) if views else "", lines))))
    return FAILED if unread else DONE


def _json_entry(machine: Machine, answer: tuple[Any, FrameView] | DaemonError) -> dict[str, Any]:
    entry = {"machine": machine.name, "url": machine.url}
    if isinstance(answer, DaemonError):
        return {**entry, "problem": str(answer), "frame": None}
    return {**entry, "problem": "", "frame": answer[0]}
