"""``gpumond serve``: run the daemon."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumond.cli.arguments import DONE, add_option, option_type
from gpumond.devices import SOURCES, detect_sources
from gpumond.facts.units import parse_seconds_argument

if TYPE_CHECKING:
    from gpumond.config.loading import LastValidFile
    from gpumond.config.settings import Settings

ACCESS_SETTINGS = ("insecure", "web_config", "tokens_file")
OPTION_SETTINGS = (
    "source",
    "listen",
    "socket",
    "runtime_dir",
    "state_dir",
    "interval",
    "log_format",
    "log_level",
    *ACCESS_SETTINGS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "|".join(("auto", *(spec.name for spec in SOURCES)))
    add_option(
        parser,
        f"--source {names}",
        "what reads the GPUs: nvml (NVIDIA), drm (AMD and Intel), sim (simulated GPUs), all, or auto (default): the "
        "drivers that are present at startup",
    )
    add_common_arguments(parser)


DEFAULT_STATE_DIR = "/var/lib/gpumond as root, otherwise $XDG_STATE_HOME/gpumond or ~/.local/state/gpumond"


def add_common_arguments(
    parser: argparse.ArgumentParser, interval: str = "1s", log_level: str = "info", state_dir: str = DEFAULT_STATE_DIR
) -> None:
    """Add the options that ``serve`` and ``demo`` share, with their defaults in words."""
    add_option(parser, "--config FILE", "your configuration file (YAML); options override it", type=Path)
    add_option(
        parser,
        "--listen, --web.listen-address HOST:PORT",
        "address to serve metrics, API and web UI on (default: 127.0.0.1:9917)",
    )
    add_option(
        parser,
        "--socket PATH",
        "Unix socket for agents (default: agent.sock in --runtime-dir; without it, in /run/gpumond as root, otherwise "
        "in $XDG_RUNTIME_DIR/gpumond or ~/.local/state/gpumond)",
    )
    add_option(
        parser,
        "--runtime-dir PATH",
        "directory for api.sock and the daemon's token (default: the directory of --socket)",
    )
    add_option(
        parser,
        "--state-dir PATH",
        f"directory of the store and of a copy of the last valid configuration (default: {state_dir})",
    )
    add_option(
        parser,
        "--interval DURATION",
        f"time between readings (default: {interval})",
        type=option_type(_checked_duration),
    )
    add_option(
        parser,
        "--insecure",
        "allow non-loopback addresses without TLS; anyone who can reach them can read all data, unless --web-config "
        "defines users",
        default=None,
    )
    add_option(
        parser,
        "--web-config, --web.config.file FILE",
        "file with your TLS and user settings, in the format of Prometheus' exporters",
        type=Path,
    )
    add_option(parser, "--tokens-file FILE", "file with your tokens and their scopes", type=Path)
    add_option(parser, "--log-format text|json", "log format on standard error (default: text)")
    add_option(parser, "--log-level, --log.level debug|info|warning|error", f"minimum log level (default: {log_level})")


def run(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGHUP, lambda *_: None)  # its default would end a daemon that doesn't handle signals yet
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would read the metadata of all packages
    from gpumond.config.loading import ConfigurationFile

    file = ConfigurationFile(arguments.config, option_values(arguments))
    settings, last_valid = file.load_or_use_copy()
    return serve(settings, choose_source(settings.source), file.load, last_valid=last_valid, may_lack_port=True)


def _checked_duration(text: str) -> str:
    """Return a duration that has a unit as it is written, for the messages about it. Raises ValueError."""
    parse_seconds_argument(text)
    return text


def option_values(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name, None) for name in OPTION_SETTINGS}


def serve(
    settings: Settings,
    source: str,
    reload: Callable[[], Settings],
    diagnosis_speed: float = 1.0,
    on_bound: Callable[[str], None] = lambda address: None,
    last_valid: LastValidFile | None = None,
    may_lack_port: bool = False,
) -> int:
    """Run the daemon in this process until a signal stops it.

    ``diagnosis_speed``: how much faster diagnosis time passes. ``on_bound`` is called with the web UI's address when
    the port accepts connections. ``last_valid``: the content in effect instead of an invalid configuration file.
    ``may_lack_port``: do not end if another program uses the port.
    """
    import asyncio

    from gpumond.host import logs

    log_filter = logs.configure_logging(settings.log_format, settings.log_level)
    from gpumond.daemon import server

    asyncio.run(
        server.serve(settings, source, reload, diagnosis_speed, log_filter, on_bound, last_valid, may_lack_port)
    )
    return DONE


def choose_source(name: str, sysfs: str = "/sys") -> str:
    """Resolve ``auto`` to a source for this machine. Raises SourceUnavailable if there is no driver."""
    if name != "auto":
        return name
    sources = detect_sources(sysfs)
    return sources[0].name if len(sources) == 1 else "all"
