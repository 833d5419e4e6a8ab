"""``gpumond serve``: the daemon."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumond.cli import DONE
from gpumond.config import Settings, load
from gpumond.errors import SourceUnavailable

SETTINGS = ("source", "listen", "socket", "state_dir", "interval", "insecure")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="auto|nvml|drm|sim", help="where device facts come from (auto)")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``serve`` and ``demo`` share."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration in YAML")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of metrics, API and page (127.0.0.1:9917)")
    parser.add_argument("--socket", metavar="PATH", help="unix socket of the agents (in the runtime directory)")
    parser.add_argument("--state-dir", metavar="PATH", help="where state that outlives the daemon is kept")
    parser.add_argument("--interval", metavar="SECONDS", help="time from tick to tick (1)")
    parser.add_argument("--insecure", action="store_true", default=None, help="allow a non-loopback address")


def run(arguments: argparse.Namespace) -> int:
    def reload() -> Settings:
        return load(arguments.config, flags(arguments))

    settings = reload()
    return serve(settings, choose_source(settings.source), reload)


def flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name, None) for name in SETTINGS}


def serve(settings: Settings, source: str, reload: Callable[[], Settings]) -> int:
    """Runs the daemon in this process until it is told to stop."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    from gpumond import server

    asyncio.run(server.serve(settings, source, reload))
    return DONE


def choose_source(name: str, sys_root: str = "/sys") -> str:
    """What ``auto`` means on this machine. Raises SourceUnavailable if there is nothing to read."""
    if name != "auto":
        return name
    from gpumond.sources.drm_cards import cards

    nvidia, others = _loads("libnvidia-ml.so.1"), any(cards(sys_root))
    if nvidia or others:
        return "every" if nvidia and others else "nvml" if nvidia else "drm"
    raise SourceUnavailable(
        "no_driver",
        "no GPU driver found (libnvidia-ml.so.1 does not load, no device of amdgpu, i915 or xe); install the driver, "
        "or try `gpumond demo`, which needs no GPU",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
