"""``gpumond top``: show devices, processes, alerts and verdicts live, or one frame as text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, option_type, parse_address
from gpumond.facts.errors import ConfigError
from gpumond.top.connection import short_names
from gpumond.view.frame import CheckedFrame, frame_view, merge_views, view_of_device
from gpumond.view.tables import status_page, suspended_programs
from gpumond.view.text import output_width, wrap_text


class HttpDaemonClient:
    """Requests to a daemon through ``gpumond.cli.client``."""

    def __init__(self, url: str) -> None:
        self.url, self.reached = url, client.request_address(url)

    def frame(self) -> CheckedFrame:
        return client.frame(self.url)

    def get(self, path: str) -> Any:
        return client.get(self.url, path, {"Accept": "application/json"})

    def post(self, path: str, body: object, timeout: float) -> Any:
        return client.post(self.url, path, body, timeout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--once", "print the tables once and exit (for scripts)")
    add_option(parser, "--device GPU", "show one GPU: index, UUID or its prefix, or PCI address")
    add_option(
        parser,
        "--url",
        f"your daemon's address; repeat it to show several daemons (default: $GPUMOND_URL, then {client.DEFAULT_URL})",
        action="append",
        type=parse_address,
    )
    add_option(
        parser,
        "--columns NAMES",
        "columns of the process table, such as used,shares,command (default: those that you last chose with `c`)",
        type=option_type(_parse_columns),
        default=(),
    )
    add_option(parser, "--json", "with --once: print JSON")


def _parse_columns(text: str) -> Sequence[str]:
    from gpumond.top.processes import column_names

    return column_names(text)


def run(arguments: argparse.Namespace) -> int:
    urls = arguments.url or [parse_address(client.default_url())]
    if arguments.device is not None and len(urls) > 1:
        raise ConfigError("--device requires a single --url")
    device = None if arguments.device is None else client.resolve_device_uuid(urls[0], arguments.device)
    if arguments.once and arguments.columns:
        raise ConfigError("--columns has no effect with --once")
    if arguments.once:
        frames = [client.frame(url) for url in urls]
        if arguments.json:
            print(json.dumps(frames[0] if len(frames) == 1 else frames, indent=2))
        else:
            views = [frame_view(frame) for frame in frames]
            content = views[0] if len(views) == 1 else merge_views([*zip(short_names(urls), views, strict=True)])
            complete_command = partial(client.with_commands, url=urls[0]) if len(urls) == 1 else str
            suspended = (wrap_text(suspended_programs(frame, device), output_width()) for frame in frames)
            tables = (status_page(view_of_device(content, device), completed=complete_command), *suspended)
            print("\n\n".join(filter(None, tables)))
        return DONE
    if arguments.json:
        raise ConfigError("--json requires --once")
    if os.environ.get("TERM") == "dumb":
        raise ConfigError("this terminal isn't supported (TERM=dumb); run gpumond top --once")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("standard input or output isn't a terminal; for scripts, run gpumond top --once")
    from gpumond.top.app import TopApp  # not needed for --once

    TopApp([HttpDaemonClient(url) for url in urls], device, arguments.columns).run()
    return DONE
