"""``gpumond audit [verify]``: show the audit log of changes and flushes, and verify its integrity."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from gpumond.cli import client
from gpumond.cli.arguments import DONE, FAILED, count, print_answer
from gpumond.facts.errors import DaemonError
from gpumond.view.audit import sentence
from gpumond.view.text import moment, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("show", "verify"),
        default="show",
        help="show the entries (default), or verify the hash chain of the audit log on this machine",
    )
    parser.add_argument(
        "--limit",
        type=count,
        default=100,
        metavar="N",
        help="number of entries to show, most recent last (default: 100)",
    )
    parser.add_argument(
        "--operation", metavar="ID", help="only entries of one gpumond fleet operation, which printed this id"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="with verify: a stopped daemon's configuration file"
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="PATH",
        help="with verify: state directory (default: the daemon's, at --url)",
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return _verify(arguments) if arguments.what == "verify" else _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    query = {"limit": arguments.limit} | ({"operation": arguments.operation} if arguments.operation else {})
    entries = client.get(arguments.url, f"/api/v1/audit?{urlencode(query)}")
    print_answer(arguments, entries, lambda: table((">SEQ", "AT", "BY", "ENTRY"), _rows(entries)))
    return DONE


def _rows(entries: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for entry in entries:
        text = sentence(entry["action"], entry["detail"])
        yield [str(entry["seq"]), moment(entry["at"]), entry["actor"], text]


def _verify(arguments: argparse.Namespace) -> int:
    from gpumond.config.loading import load
    from gpumond.store.audit import verify_audit

    named = None if arguments.config or arguments.state_dir else _store_of(arguments.url)
    file = named or load(arguments.config, {"state_dir": arguments.state_dir}).store_file()
    wrong = verify_audit(file)
    text = "\n".join(f"{file}: {problem}" for problem in wrong) or f"{file}: the audit log is intact"
    print_answer(arguments, {"file": str(file), "problems": wrong}, lambda: text)
    return FAILED if wrong else DONE


def _store_of(url: str) -> Path | None:
    """Return the store of the daemon at an address of this machine; None if no daemon answers there and states it."""
    if not client.is_local(url):
        return None
    try:
        named = client.get(url, "/api/v1/status").get("store_file")
    except DaemonError:
        return None
    return Path(named) if named else None
