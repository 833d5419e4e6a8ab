"""``gpumond audit [verify]``: show the audit log of changes and flushes, or verify it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from gpumond.cli import client
from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO, add_option, parse_count, print_result
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.units import caller_text
from gpumond.view.audit import audit_sentence
from gpumond.view.text import table, time_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("show", "verify"),
        default="show",
        help="show the entries (default), or verify them against the daemon's log; run verify on the daemon's machine",
    )
    add_option(
        parser, "--limit N", "number of entries to show, most recent last (default: 100)", type=parse_count, default=100
    )
    add_option(parser, "--operation ID", "only the entries of one `gpumond fleet` command, by the ID that it printed")
    add_option(
        parser,
        "--log FILE",
        "with verify: the daemon's log, preferably collected on another machine (default: standard input)",
        type=Path,
    )
    add_option(parser, "--config FILE", "with verify: a stopped daemon's configuration file", type=Path)
    add_option(
        parser,
        "--state-dir PATH",
        "with verify: state directory (default: the one that the daemon at --url uses)",
        type=Path,
    )
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what == "verify":
        return _verify(arguments)
    for name in ("log", "config", "state_dir"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} requires verify, as in `gpumond audit verify --log FILE`")
    return _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    query = {"limit": arguments.limit} | ({"operation": arguments.operation} if arguments.operation else {})
    entries = client.get(arguments.url, f"/api/v1/audit?{urlencode(query)}")
    user_name = client.user_names(arguments.url)
    print_result(arguments, entries, lambda: table((">SEQ", "AT", "BY", "ENTRY"), _rows(entries, user_name)))
    return DONE


def _rows(entries: Sequence[dict[str, Any]], user_name: Callable[[int], str | None]) -> Iterator[list[str]]:
    for entry in entries:
        text = audit_sentence(entry["action"], entry["detail"])
        yield [str(entry["seq"]), time_text(entry["at"]), caller_text(entry["actor"], user_name=user_name), text]


def _verify(arguments: argparse.Namespace) -> int:
    from gpumond.config.loading import load_settings
    from gpumond.store.audit import verify

    if arguments.log is None and sys.stdin.isatty():
        raise ConfigError(
            "--log: expected a file with the daemon's log, or: journalctl -u gpumond | gpumond audit verify"
        )
    store_file = None if arguments.config or arguments.state_dir else _store_file_of(arguments.url)
    file = store_file or load_settings(arguments.config, {"state_dir": arguments.state_dir}).store_file()
    try:
        with open(arguments.log, errors="replace") if arguments.log else nullcontext(sys.stdin) as lines:
            entries, problems = verify(file, lines)
    except (OSError, UnicodeDecodeError) as error:
        remedy = "; expected the daemon's log: journalctl -u gpumond > FILE writes it" if arguments.log else ""
        reason = f"{getattr(error, 'strerror', None) or 'not text'}{remedy}"
        raise ConfigError(f"--log: can't read {arguments.log or 'standard input'}: {reason}") from None
    are = "entry is" if entries == 1 else "entries are"
    nothing = (
        f"{arguments.log or 'standard input'} contains no audit entries; to verify those of the daemon's log: "
        "journalctl -u gpumond | gpumond audit verify"
    )
    unchanged = f"{file}: {entries} logged {are} unchanged" if entries else nothing
    text = "\n".join(f"{file}: {problem}" for problem in problems) or unchanged
    print_result(arguments, {"file": str(file), "logged_entries": entries, "problems": problems}, lambda: text)
    return FAILED if problems else DONE if entries else NOTHING_TO_DO


def _store_file_of(url: str) -> Path | None:
    """Return the store of the daemon at an address of this machine; None if no daemon answers there and states it."""
    if not client.is_local(url):
        return None
    try:
        store_file = client.get(url, "/api/v1/status").get("store_file")
    except DaemonError:
        return None
    return Path(store_file) if store_file else None
