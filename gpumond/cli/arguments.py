"""Values of options, in one syntax for all verbs. Not a verb."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from gpumond.facts import units


def duration(text: str) -> float:
    """Convert a duration such as ``90``, ``90s`` or ``1h30m`` to seconds. Raises ArgumentTypeError."""
    try:
        return units.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: {error}") from None


def add_target(parser: argparse.ArgumentParser, purpose: str, device: bool = True) -> argparse._ActionsContainer:
    """Add the options that select programs, of which one is required, and return their group.

    ``purpose``: what happens to a selected program, such as ``flush``. ``device``: add the option for a device.
    """
    target = parser.add_mutually_exclusive_group(required=device)
    target.add_argument("--pid", type=int, metavar="N", help=f"{purpose} one process")
    if device:
        target.add_argument(
            "--device",
            metavar="NAME",
            help=f"{purpose} every process with an agent on one device: index, UUID or its prefix, or PCI address",
        )
    target.add_argument("--workload", metavar="NAME", help=f"{purpose} every process of one workload")
    return target


def address(text: str) -> str:
    """Return the address of a daemon. ``HOST:PORT`` and ``:PORT`` are over HTTP. Raises ArgumentTypeError."""
    url = text if "://" in text else f"http://{'127.0.0.1' if text.startswith(':') else ''}{text}"
    if not url.startswith(("http://", "https://", "unix:///")) or not _has_valid_host(url):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80}: expected HOST:PORT, an http:// or https:// address, or unix:///DIRECTORY/api.sock"
        )
    return url


def _has_valid_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "unix" or (bool(parts.hostname) and parts.port != 0)
    except ValueError:  # of the port, or of an IPv6 address
        return False
