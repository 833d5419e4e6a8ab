"""``gpumond top``: show devices, processes, alerts and verdicts live, or one frame as text."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any

from gpumond.cli import DONE, WRONG_USE, client
from gpumond.cli.status import notes, process_table
from gpumond.top.ledger import GROUNDS, Line, Piece, device_lines
from gpumond.top.view import View, of_device, view


class Daemon:
    """Requests to the daemon at ``url`` through ``gpumond.cli.client``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        return client.get(self.url, path)

    def post(self, path: str, body: object, timeout: float) -> Any:
        return client.post(self.url, path, body, timeout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one frame as text and exit, for scripts")
    parser.add_argument("--device", metavar="NAME", help="show one device: index, UUID or its prefix, or PCI address")
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    daemon = Daemon(arguments.url)
    device = None if arguments.device is None else client.device(arguments.url, arguments.device)
    if arguments.once:
        frame = daemon.get("/api/v1/frame")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        print(json.dumps(frame, indent=2) if arguments.json else _page(of_device(view(frame), device)))
        return DONE
    if arguments.json:
        print("gpumond: --json requires --once", file=sys.stderr)
        return WRONG_USE
    from gpumond.top.app import Top

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(
            "gpumond: standard input or output is not a terminal; for scripts, run gpumond top --once", file=sys.stderr
        )
        return WRONG_USE
    top = Top(daemon, device=device)
    top.run()
    return top.return_code or DONE


def _page(seen: View) -> str:
    terminal = sys.stdout.isatty()
    coloured = terminal and not os.environ.get("NO_COLOR") and os.environ.get("COLORTERM") in ("truecolor", "24bit")
    width = shutil.get_terminal_size().columns if terminal else 80
    lines = device_lines(seen, width, sys.maxsize, monochrome=not coloured)
    devices = "\n".join(_ansi(line) if coloured else _text(line) for line in lines)
    return "\n\n".join(section for section in (devices, process_table(seen), *notes(seen)) if section)


def _text(line: Line) -> str:
    return "".join(piece.text for piece in line).rstrip()


def _ansi(line: Line) -> str:
    return "".join(
        f"\x1b[{';'.join(codes)}m{piece.text}\x1b[0m" if (codes := [*_codes(piece)]) else piece.text for piece in line
    )


def _codes(piece: Piece) -> Iterator[str]:
    if piece.ground:
        red, green, blue = bytes.fromhex(GROUNDS[piece.ground].lstrip("#"))
        yield f"48;2;{red};{green};{blue}"
    if piece.style:
        yield {"bold": "1", "dim": "2", "alarm": "7"}[piece.style]
