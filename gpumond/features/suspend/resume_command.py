"""``gpumond resume``: move the memory of suspended programs back to the device, and print receipts."""

from __future__ import annotations

import argparse

from gpumond.cli import client
from gpumond.cli.arguments import add_target, duration
from gpumond.facts.errors import ConfigError
from gpumond.features.suspend.suspend_command import request, target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "resume", device=False).add_argument(
        "--all", action="store_true", help="resume every suspended program"
    )
    parser.add_argument(
        "--wait",
        type=duration,
        default=0.0,
        metavar="DURATION",
        help="how long to wait for its memory, such as 10m (default: 0)",
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.pid is None and arguments.workload is None and not arguments.all:
        raise ConfigError("resume: one of --pid, --workload and --all is required")
    return request(
        arguments, "/api/v1/resumptions", {"target": target(arguments), "wait_seconds": min(arguments.wait, 3600.0)}
    )
