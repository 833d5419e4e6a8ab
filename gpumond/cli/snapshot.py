"""``gpumond snapshot --pid PID``: make a program write its framework's memory snapshot, and fetch the file."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from typing import Any

from gpumond.cli import DONE, client
from gpumond.errors import ConfigError, DaemonError, GpumondError
from gpumond.model.units import human, seconds

ANSWER_SECONDS = 60.0
"""Longest wait for the answer of a program, besides the recording."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program(parser)
    parser.add_argument("--out", metavar="FILE", help="fetch the snapshot, and write it to this file")
    client.add_arguments(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", required=True, type=int, metavar="PID", help="pid of the program")
    parser.add_argument(
        "--record",
        metavar="DURATION",
        help="record the stacks of allocations for this time first, such as 60s; also writes a treemap (HTML)",
    )


def run(arguments: argparse.Namespace) -> int:
    body = recording(arguments.record)
    path = f"/api/v1/agents/{arguments.pid}"
    dump = client.post(arguments.url, f"{path}/snapshot", body, timeout=duration(body) + ANSWER_SECONDS)
    if arguments.out is not None:
        fetch(arguments.url, path, dump, arguments.out)
    if arguments.json:
        print(json.dumps(dump))
    else:
        where = arguments.out or f"{dump['path']} on the program's machine (--out FILE fetches it)"
        print(f"{human(dump['size_bytes'])} of {dump['allocator']} in {where}")
    return DONE


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


def fetch(url: str, path: str, dump: dict[str, Any], out: str) -> None:
    """Write a snapshot's file to ``out``, which is complete or absent. Raises GpumondError."""
    if dump.get("id") is None:
        raise DaemonError("the program's agent is too old to send the file")
    partial = f"{out}.{os.getpid()}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            client.download(url, f"{path}/snapshots/{dump['id']}", file)
        os.replace(partial, out)
    except OSError as error:
        raise GpumondError(f"{out}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            os.unlink(partial)
