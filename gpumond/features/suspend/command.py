"""``gpumond suspend`` and ``gpumond resume``: move the device memory of programs to the host and back."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import (
    DONE,
    FAILED,
    NOTHING_TO_DO,
    add_option,
    add_target,
    parse_duration,
    print_error,
    print_result,
    with_typed_option,
)
from gpumond.cli.progress import announce_if_slow
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.view.text import printable, size_or_dash, table

MAX_WAIT_SECONDS = 3600.0
"""Longest wait for an answer: a suspension takes as long as a copy of the memory."""
ANNOUNCE_SECONDS = 4.0
"""Time after which a wait is announced: memory that is missing is refused within two seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "suspend", device=False)
    add_option(
        parser,
        "--idle-for DURATION",
        "only programs idle for at least this long, such as 1h; if you select no program, all that allow suspension",
        type=parse_duration,
    )
    add_option(parser, "--dry-run", "show what would be suspended or refused, and suspend nothing")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.pid is None and arguments.workload is None and arguments.idle_for is None:
        raise ConfigError("one of NAME, --pid, --workload and --idle-for is required; see `gpumond suspend --help`")
    body = {
        "target": target(arguments),
        "idle_for_seconds": arguments.idle_for or 0.0,
        "dry_run": arguments.dry_run,
    }
    return send_request(arguments, "/api/v1/suspensions", body)


def target(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the programs that the options select."""
    if arguments.pid is not None:
        return {"pid": arguments.pid}
    return {"workload": arguments.workload} if arguments.workload is not None else {"all": True}


def send_request(arguments: argparse.Namespace, path: str, body: Mapping[str, Any], wait_seconds: float = 0.0) -> int:
    """Send a request, print its receipts, and return the exit code.

    A resumption that waits is first asked for without a wait, so the user reads what it waits for.
    """
    try:
        with announce_if_slow("waiting until the daemon has moved the memory", ANNOUNCE_SECONDS):
            answer = client.post(arguments.url, path, body, timeout_seconds=MAX_WAIT_SECONDS)
        waiting = [each for each in answer["receipts"] if each["missing_bytes"]] if wait_seconds else []
        if waiting:
            for each in waiting:
                print_error(f"gpumond resume: waiting: {printable(each['reason'])}")
            done = [each for each in answer["receipts"] if each not in waiting]
            answer = client.post(
                arguments.url, path, {**body, "wait_seconds": wait_seconds}, timeout_seconds=MAX_WAIT_SECONDS
            )
            answer["receipts"] = done + answer["receipts"]
    except DaemonError as error:
        print_error(f"gpumond: {with_typed_option(error, arguments)}")
        return client.exit_code_of(arguments, error)
    receipts = answer["receipts"]
    print_result(arguments, answer, lambda: receipt_table(receipts, arguments.url))
    outcomes = {each["outcome"] for each in receipts}
    if outcomes & {"failed", "timeout", "refused"}:
        return FAILED
    return DONE if outcomes & {"suspended", "resumed", "planned", "gone"} else NOTHING_TO_DO


def receipt_table(receipts: Sequence[Mapping[str, Any]], url: str) -> str:
    """Return the receipts as a table. ``url``: the daemon's, for the commands."""
    header = (">PID", "PROGRAM", "OUTCOME", ">EXPECTED", ">DRIVER", ">HOST", ">TOOK", "REASON")
    rows = [
        [
            str(each["pid"]),
            printable(each["workload"]) or "-",
            each["outcome"],
            size_or_dash(each["expected_bytes"]),
            size_or_dash(each["released_bytes"]),
            size_or_dash(each["host_bytes"]),
            f"{each['duration_seconds']:.2f} s",
            client.with_commands(printable("; ".join(filter(None, (each["reason"], each["remedy"])))), url),
        ]
        for each in receipts
    ]
    return table(header, rows)


class ResumeCommand:
    """``gpumond resume``."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_option(add_target(parser, "resume", device=False), "--all", "resume every suspended program")
        add_option(
            parser,
            "--wait DURATION",
            "how long to wait for the memory, such as 10m (default: don't wait)",
            type=parse_duration,
            default=0.0,
        )
        client.add_arguments(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        if arguments.pid is None and arguments.workload is None and not arguments.all:
            raise ConfigError("one of NAME, --pid, --workload and --all is required; see `gpumond resume --help`")
        return send_request(
            arguments, "/api/v1/resumptions", {"target": target(arguments)}, min(arguments.wait, MAX_WAIT_SECONDS)
        )
