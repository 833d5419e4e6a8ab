"""``gpumond limit``: limit the memory that the allocators of programs may hold."""

from __future__ import annotations

import argparse

from gpumond.cli import client
from gpumond.cli.arguments import add_target
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import typed_size
from gpumond.view.text import size, table

SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "limit", device=False)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="limit on one GPU (index, UUID or its prefix, or PCI address); alone: every process with an agent there",
    )
    parser.add_argument(
        "limit", metavar="SIZE|none", help="most memory its pools may hold, such as 40GiB; none removes the limit"
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.pid is None and arguments.workload is None and arguments.device is None:
        raise ConfigError("one of --pid, --workload and --device is required")
    try:
        limit_bytes = None if arguments.limit == "none" else typed_size(arguments.limit)
    except ValueError as error:
        raise ConfigError(f"limit {arguments.limit!r:.80}: {error}") from None
    body = {"limit_bytes": limit_bytes, "device": arguments.device}
    answers, status = client.ask_programs(arguments, "limit", body, SECONDS)
    if not answers:
        return status
    gpus = client.gpu_names(arguments.url)
    header = (">PID", "PROGRAM", "ALLOCATOR", "GPU", ">LIMIT", "APPLIED", "REASON")
    rows = [
        [
            str(program.pid),
            program.workload or "-",
            each["allocator"] or "-",
            gpus.get(each["device_uuid"], each["device_uuid"] or "-").removeprefix("GPU "),
            "none" if each["limit_bytes"] is None else size(each["limit_bytes"]),
            "yes" if each["applied"] else "no",
            each["reason"],
        ]
        for program, applied in answers
        for each in applied
    ]
    print(client.as_json(arguments, answers, "limits") if arguments.json else table(header, rows))
    return status
