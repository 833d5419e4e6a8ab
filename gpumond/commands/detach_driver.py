"""``gpumond detach-driver --for DURATION``: release the driver for maintenance."""

from __future__ import annotations

import argparse
import time

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, parse_duration, print_result
from gpumond.facts.units import clock_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--for DURATION",
        "how long to stay detached, such as 120s or 5m",
        dest="duration",
        type=parse_duration,
        required=True,
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    answer = client.post(arguments.url, "/api/v1/release", {"for_seconds": arguments.duration}, timeout_seconds=30)
    until = clock_text(answer["released_until"], time.time())
    print_result(arguments, answer, lambda: f"detached from the driver until {until}; gpumond then reattaches")
    return DONE
