"""``gpumond limit``: limit the memory that the allocators of one program may hold."""

from __future__ import annotations

import argparse
import json
import sys

from gpumond.cli import DONE, NOTHING_TO_DO, client
from gpumond.cli.table import size, table
from gpumond.errors import ConfigError, DaemonError
from gpumond.model.units import level

SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, required=True, metavar="N", help="the program; it must allow limits")
    parser.add_argument("--device", metavar="NAME", help="one device: index, UUID or its prefix, or PCI address")
    parser.add_argument("limit", metavar="SIZE|none", help="maximum size of its pools, such as 40GiB; none: no limit")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        limit_bytes = None if arguments.limit == "none" else int(level(arguments.limit))
    except ValueError as error:
        raise ConfigError(f"limit {arguments.limit!r:.80}: {error}") from None
    body = {"limit_bytes": limit_bytes, "device": arguments.device}
    try:
        applied = client.post(arguments.url, f"/api/v1/agents/{arguments.pid}/limit", body, SECONDS)
    except DaemonError as error:
        if error.status != 404:
            raise
        print(f"gpumond: {error}", file=sys.stderr)
        return NOTHING_TO_DO
    header = ("ALLOCATOR", "DEVICE", ">LIMIT", "APPLIED", "REASON")
    rows = [
        [
            each["allocator"],
            each["device_uuid"] or "-",
            "none" if each["limit_bytes"] is None else size(each["limit_bytes"]),
            "yes" if each["applied"] else "no",
            each["reason"],
        ]
        for each in applied
    ]
    print(json.dumps(applied, indent=2) if arguments.json else table(header, rows))
    return DONE
