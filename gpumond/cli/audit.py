"""``gpumond audit [verify]``: show the audit log of changes and flushes, and verify its integrity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumond.cli import DONE, FAILED, client
from gpumond.cli.table import moment, table

COLUMNS, QUOTE = 100, '"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("show", "verify"),
        default="show",
        help="verify: check the hash chain of the audit log on this machine",
    )
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="number of entries to show, newest first (default: 100)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="verify: configuration file of the daemon")
    parser.add_argument("--state-dir", type=Path, metavar="PATH", help="verify: state directory of the daemon")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return _verify(arguments) if arguments.what == "verify" else _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    entries = client.get(arguments.url, f"/api/v1/audit?limit={arguments.limit}")
    print(
        json.dumps(entries, indent=2)
        if arguments.json
        else table((">SEQ", "AT", "BY", "WHAT", "DETAIL"), _rows(entries))
    )
    return DONE


def _rows(entries: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for entry in entries:
        yield [str(entry["seq"]), moment(entry["at"]), entry["actor"], entry["action"], described(entry["detail"])]


def described(detail: Any) -> str:
    """Return the detail as pairs of key and value, as many as fit."""
    pairs = detail.items() if isinstance(detail, dict) else [("detail", detail)]
    text = ", ".join(f"{key}: {json.dumps(value).strip(QUOTE)}" for key, value in pairs)
    return text if len(text) <= COLUMNS else f"{text[:COLUMNS].rpartition(',')[0] or text[:COLUMNS]}, …"


def _verify(arguments: argparse.Namespace) -> int:
    from gpumond.config import load
    from gpumond.store import verify_audit

    file = load(arguments.config, {"state_dir": arguments.state_dir}).store_file()
    wrong = verify_audit(file)
    if arguments.json:
        print(json.dumps({"file": str(file), "problems": wrong}, indent=2))
    else:
        print("\n".join(f"{file}: {problem}" for problem in wrong) or f"{file}: the audit log is intact")
    return FAILED if wrong else DONE
