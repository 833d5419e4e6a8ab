"""``gpumond open``: open the web UI in a browser, signed in."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from contextlib import suppress

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.units import duration_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_url(parser)
    add_option(parser, "--print", "print the address instead of opening a browser")


def run(arguments: argparse.Namespace) -> int:
    if arguments.url.startswith("unix:"):
        raise ConfigError(f"--url {arguments.url}: a browser needs an http:// or https:// address")
    url = _web_address(arguments.url)
    if not client.is_trusted_daemon(url):
        raise DaemonError(
            f"can't verify that {url} is your daemon, so no sign-in code was sent; pass its https:// address with "
            "--url, or the address on this machine of a daemon that you, root or the service's user runs"
        )
    answer = client.post(arguments.url, "/api/v1/sessions/code", {}, 10.0)
    address = f"{url.rstrip('/')}/#code={answer['code']}"
    if arguments.print or not (_has_display() and webbrowser.open(address)):
        valid = duration_text(answer["valid_seconds"])
        print(address, flush=True)
        print(f"open the address within {valid}; it signs one browser in", file=sys.stderr)
    return DONE


def _web_address(url: str) -> str:
    """Return the address of the web UI: by default, that of the daemon at the usual socket."""
    if url.rstrip("/") != client.DEFAULT_URL:
        return url
    with suppress(DaemonError):
        stated = str(client.get(url, "/api/v1/status")["url"] or "")
        return stated if client.is_local(stated) else url
    return url


def _has_display() -> bool:
    """Return False where ``webbrowser`` would start a browser in this terminal."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
