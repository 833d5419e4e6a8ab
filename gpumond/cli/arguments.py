"""Values of options, in one syntax for all verbs. Not a verb."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from gpumond.model import units


def duration(text: str) -> float:
    """Convert a duration such as ``90``, ``90s`` or ``1h30m`` to seconds. Raises ArgumentTypeError."""
    try:
        return units.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80}: {error}") from None


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
