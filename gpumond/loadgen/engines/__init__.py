"""Where plans are carried out in real time. To add an engine: write ``engines/NAME.py`` with ``engine(settings)``
and add it to ``ENGINES``. A library is imported when its engine is opened, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from gpumond.errors import GpumondError

ENGINES: Mapping[str, str] = {
    "sim": "a simulated card; needs no GPU",
    "cupy": "CuPy's memory pool, or cudaMalloc with --raw",
    "torch": "PyTorch's caching allocator",
}


class AllocationRefused(GpumondError):
    """The engine cannot do it here; nothing was taken. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``card``: of the sim engine, the directory of its card. ``raw``: past CuPy's pool."""

    device: int = 0
    card: Path | None = None
    raw: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Room:
    """A device as its framework sees it, this program's context already there."""

    device_uuid: str | None
    size_bytes: int
    free_bytes: int


class LoadEngine(Protocol):
    """Blocks are numbers that the plan gives. Only the device's program calls it, from one thread.

    ``take`` raises MemoryError when the device, or the limit, is full; it has then changed nothing.
    """

    name: str
    has_contents: bool
    makes_orphans: bool
    scratch_bytes: int
    """What it needs for itself, of what it may take."""

    def open(self) -> Room: ...  # raises Refused, ConfigError
    def limit(self, size_bytes: int) -> None: ...  # never allocates more than that, caches included
    def take(self, block: int, size_bytes: int, outside: bool) -> None: ...
    def give(self, block: int) -> None: ...
    def busy(self, ratio: float) -> None: ...
    def flush(self) -> int: ...  # bytes that went back to the device
    def live_bytes(self) -> int: ...
    def held_bytes(self) -> int: ...
    def write(self, block: int) -> None: ...  # fills a block with a pattern of its own; only if it has_contents
    def wrong_words(self, block: int) -> int: ...  # how many 8-byte words of it are not what was written
    def abandon(self) -> Path: ...  # leaves all to nobody until that file is removed; only if it makes_orphans
    def close(self) -> None: ...  # frees all


def engine(name: str, settings: EngineSettings) -> LoadEngine:
    return cast("LoadEngine", import_module(f"gpumond.loadgen.engines.{name}").engine(settings))
