"""``gpumond serve``: run the daemon."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumond.cli.arguments import DONE, duration
from gpumond.devices import SOURCES, detected

if TYPE_CHECKING:
    from gpumond.config.loading import LastValidFile
    from gpumond.config.settings import Settings

ACCESS = ("insecure", "web_config", "tokens_file")
SETTINGS = ("source", "listen", "socket", "runtime_dir", "state_dir", "interval", "log_format", "log_level", *ACCESS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "|".join(("auto", *(spec.name for spec in SOURCES)))
    parser.add_argument("--source", metavar=names, help="drivers to read GPUs through (default: auto)")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser, interval: str = "1s") -> None:
    """Add the options that ``serve`` and ``demo`` share. ``interval``: the default, in words."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="your configuration file (YAML)")
    parser.add_argument(
        "--listen",
        "--web.listen-address",
        dest="listen",
        metavar="HOST:PORT",
        help="address to serve metrics, API and web UI on (default: 127.0.0.1:9917)",
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="Unix socket for agents (default: agent.sock in /run/gpumond as root, else in $XDG_RUNTIME_DIR/gpumond)",
    )
    parser.add_argument(
        "--runtime-dir", metavar="PATH", help="directory for api.sock and the token (default: that of --socket)"
    )
    parser.add_argument("--state-dir", metavar="PATH", help="directory for persistent state")
    parser.add_argument(
        "--interval", type=duration, metavar="DURATION", help=f"time between readings (default: {interval})"
    )
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="allow non-loopback addresses without TLS"
    )
    parser.add_argument(
        "--web-config",
        "--web.config.file",
        dest="web_config",
        type=Path,
        metavar="FILE",
        help="your TLS and user settings, in the Prometheus exporters' format",
    )
    parser.add_argument("--tokens-file", type=Path, metavar="FILE", help="file with your tokens and their scopes")
    parser.add_argument("--log-format", metavar="text|json", help="log format on standard error (default: text)")
    parser.add_argument(
        "--log-level",
        "--log.level",
        dest="log_level",
        metavar="debug|info|warning|error",
        help="minimum log level (default: info)",
    )


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would read the metadata of all packages
    from gpumond.config.loading import ConfigurationFile

    file = ConfigurationFile(arguments.config, flags(arguments))
    settings, kept = file.load_or_keep()
    return serve(settings, choose_source(settings.source), file.load, kept=kept, without_port=True)


def flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name, None) for name in SETTINGS}


def serve(
    settings: Settings,
    source: str,
    reload: Callable[[], Settings],
    pace: float = 1.0,
    bound: Callable[[str], None] = lambda address: None,
    kept: LastValidFile | None = None,
    without_port: bool = False,
) -> int:
    """Run the daemon in this process until a signal stops it.

    ``pace`` is the factor by which diagnosis time is accelerated. ``bound`` is called with the page's address when the
    port accepts connections. ``kept``: the settings are not those of the present configuration file. ``without_port``:
    do not end if another program uses the port.
    """
    import asyncio

    from gpumond.host import logs

    log_limit = logs.configure(settings.log_format, settings.log_level)
    from gpumond.daemon import server

    asyncio.run(server.serve(settings, source, reload, pace, log_limit, bound, kept, without_port))
    return DONE


def choose_source(name: str, sys: str = "/sys") -> str:
    """Resolve ``auto`` to a source for this machine. Raises SourceUnavailable if there is no driver."""
    if name != "auto":
        return name
    found = detected(sys)
    return found[0].name if len(found) == 1 else "all"
