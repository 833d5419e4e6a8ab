"""``gpumond snapshot``: make programs write their framework's memory snapshot, and fetch the file of one."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import add_target
from gpumond.facts.errors import ConfigError, DaemonError, GpumondError
from gpumond.facts.units import human, seconds

ANSWER_SECONDS = 60.0
"""Longest wait for the answer of a program, besides the recording."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "write the snapshot of")
    add_recording(parser)
    parser.add_argument("--out", metavar="FILE", help="download the snapshot of one program to this file")
    client.add_arguments(parser)


def add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        metavar="DURATION",
        help="first record allocation stacks for this long, such as 60s; also writes them for flame graphs",
    )


def run(arguments: argparse.Namespace) -> int:
    body = recording(arguments.record)
    one_for = None if arguments.out is None else "--out"
    answers, status = client.ask_programs(arguments, "snapshot", body, duration(body) + ANSWER_SECONDS, one_for)
    for program, dump in answers:
        if arguments.out is not None:
            fetch(arguments.url, program.pid, dump, arguments.out)
        if not arguments.json:
            where = arguments.out or f"{dump['path']} on the program's machine; --out FILE downloads it"
            subject = "" if arguments.pid is not None else f"{program}: "
            print(f"{subject}wrote {human(dump['size_bytes'])} ({dump['allocator']}) to {where}")
    if arguments.json and answers:
        print(client.as_json(arguments, answers))
    return status


def recording(text: str | None) -> dict[str, float]:
    """Return the body of a request. Raises ConfigError for a wrong duration."""
    if text is None:
        return {}
    try:
        return {"record_seconds": seconds(text)}
    except ValueError as error:
        raise ConfigError(f"--record {text!r}: {error}") from None


def duration(body: dict[str, float]) -> float:
    return body.get("record_seconds", 0.0)


def fetch(url: str, pid: int, dump: dict[str, Any], out: str) -> None:
    """Write a snapshot's file to ``out``, which is complete or absent. Raises GpumondError."""
    if dump.get("id") is None:
        raise DaemonError("the program's agent is too old to send the file")
    partial = f"{out}.{os.getpid()}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            client.download(url, f"/api/v1/agents/{pid}/snapshots/{dump['id']}", file)
        os.replace(partial, out)
    except OSError as error:
        raise GpumondError(f"{out}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            os.unlink(partial)
