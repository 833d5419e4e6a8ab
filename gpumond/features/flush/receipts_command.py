"""``gpumond receipts``: the receipts of past flushes."""

from __future__ import annotations

import argparse
import json

from gpumond.cli import client
from gpumond.cli.exits import DONE
from gpumond.facts.pools import Receipt
from gpumond.features.flush.command import receipt_table
from gpumond.view.frame import checked_as


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="number of receipts, most recent last (default: 100)"
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    receipts = checked_as(tuple[Receipt, ...], client.get(arguments.url, "/api/v1/receipts"), "receipts")
    found = receipts[-arguments.limit :] if arguments.limit else []
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print(receipt_table(found) if found else "no flush since the start of the daemon")
    return DONE
