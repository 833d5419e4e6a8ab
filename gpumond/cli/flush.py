"""``gpumond flush``: make programs give memory back, and show the receipts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpumond.cli import DONE, FAILED, NOTHING_TO_DO, client
from gpumond.cli.table import size, table
from gpumond.errors import DaemonError
from gpumond.model import STEPS
from gpumond.units import level


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--pid", type=int, metavar="N", help="one process")
    target.add_argument("--device", metavar="UUID", help="every process with an agent on one device")
    target.add_argument("--workload", metavar="NAME", help="every process of that name")
    target.add_argument("--all", action="store_true", help="every process with an agent")
    parser.add_argument(
        "--step", action="append", choices=STEPS, metavar="STEP", help=f"repeatable; of {', '.join(STEPS)}"
    )
    parser.add_argument("--min-reclaimable", metavar="SIZE", default="0", help="leave alone what would return less")
    parser.add_argument("--dry-run", action="store_true", help="show what would come back, do nothing")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for each program (30)")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    names = ("pid", "device", "workload", "all")
    try:
        least = int(level(arguments.min_reclaimable))
    except ValueError as error:
        print(f"gpumond: --min-reclaimable {arguments.min_reclaimable!r}: {error}", file=sys.stderr)
        return 2
    body: dict[str, Any] = {
        "target": {name: getattr(arguments, name) for name in names if getattr(arguments, name)},
        "dry_run": arguments.dry_run,
        "min_reclaimable_bytes": least,
        "timeout_seconds": arguments.timeout,
    }
    if arguments.step:
        body["steps"] = arguments.step
    try:
        answer = client.post(arguments.url, "/api/v1/flushes", body, timeout=20 * arguments.timeout + 30)
    except DaemonError as error:
        print(f"gpumond: {error}", file=sys.stderr)
        if "receipts" not in error.problem:
            return NOTHING_TO_DO if error.status == 404 else FAILED
        answer = error.problem
    print(json.dumps(answer, indent=2) if arguments.json else _show(answer, arguments.dry_run))
    return _exit_code(answer["receipts"])


def _exit_code(receipts: Iterable[dict[str, Any]]) -> int:
    """Failed if any receipt did; nothing to do if none returned, or would return, a byte."""
    receipts = list(receipts)
    if any(receipt["outcome"] in ("failed", "timeout") for receipt in receipts):
        return FAILED
    moved = [
        receipt
        for receipt in receipts
        if receipt["outcome"] in ("freed", "partial")
        or (receipt["outcome"] == "planned" and receipt["expected"] and receipt["expected"]["high"] > 0)
    ]
    return DONE if moved else NOTHING_TO_DO


def _show(answer: Mapping[str, Any], dry_run: bool) -> str:
    header = (">PID", "PROGRAM", "ALLOCATOR", "OUTCOME", ">EXPECTED", ">RELEASED", ">DRIVER SAW", ">SECONDS", "REASON")
    total = "" if dry_run else f"\n\nreleased {size(answer['released_bytes'])}"
    return table(header, _rows(answer["receipts"])) + total


def _rows(receipts: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for receipt in receipts:
        expected = receipt["expected"]
        reason = receipt["reason"] + (" (the program allocated meanwhile)" if receipt["raced"] else "")
        yield [
            str(receipt["pid"]),
            receipt["workload"],
            receipt["allocator"] or "-",
            receipt["outcome"],
            size(expected["likely"]) if expected else "-",
            size(receipt["released_bytes"]),
            size(receipt["driver_released_bytes"]),
            f"{receipt['duration_seconds']:.2f}",
            reason,
        ]
