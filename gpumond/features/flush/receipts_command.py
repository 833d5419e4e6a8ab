"""``gpumond receipts``: the receipts of past flushes."""

from __future__ import annotations

import argparse

from gpumond.cli import client
from gpumond.cli.arguments import DONE, print_answer
from gpumond.facts.pools import Receipt
from gpumond.features.flush.command import receipt_table
from gpumond.view.frame import checked_as


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="number of receipts, newest last (default: 100)"
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    receipts = checked_as(tuple[Receipt, ...], client.get(arguments.url, "/api/v1/receipts"), "receipts")
    found = receipts[-arguments.limit :] if arguments.limit else []
    print_answer(arguments, found, lambda: receipt_table(found) if found else "no flush since the start of the daemon")
    return DONE
