"""Engines that execute plans in real time. To add one: write ``engines/NAME.py`` with ``engine(settings)``
and add it to ``ENGINES``. A library is imported when its engine is opened, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from gpumond.facts.errors import GpumondError

ENGINES: Mapping[str, str] = {
    "sim": "a simulated device; no GPU required",
    "cupy": "CuPy's memory pool, or cudaMalloc with --raw",
    "torch": "PyTorch's caching allocator",
}


class AllocationRefused(GpumondError):
    """The engine cannot execute the plan; nothing was allocated. The message states the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of engines. ``sim_directory``: that of the simulated device. ``raw``: allocate outside CuPy's pool."""

    device: int = 0
    sim_directory: Path | None = None
    raw: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Room:
    """Size and free memory of a device in its framework, with this program's context."""

    device_uuid: str | None
    size_bytes: int
    free_bytes: int


class LoadEngine(Protocol):
    """An engine. Blocks are identified by the plan's numbers. All calls are from one thread.

    ``allocate`` raises MemoryError when the device is full or the limit is reached; it then changes nothing.
    """

    name: str
    has_contents: bool
    makes_orphans: bool
    scratch_bytes: int
    """Part of the limit that the engine needs itself."""

    def open(self) -> Room: ...  # raises AllocationRefused, ConfigError
    def limit(self, size_bytes: int) -> None: ...  # upper limit of allocations, caches included
    def allocate(self, block: int, size_bytes: int, outside: bool) -> None: ...
    def free(self, block: int) -> None: ...
    def busy(self, ratio: float) -> None: ...
    def flush(self) -> int: ...  # returns bytes released to the device
    def live_bytes(self) -> int: ...
    def held_bytes(self) -> int: ...
    def write(self, block: int) -> None: ...  # fills a block with its own pattern; only if has_contents
    def wrong_words(self, block: int) -> int: ...  # number of 8-byte words that differ from the pattern
    def abandon(
        self,
    ) -> Path: ...  # leaves all blocks without an owner until that file is removed; only if makes_orphans
    def close(self) -> None: ...  # frees all blocks


def engine(name: str, settings: EngineSettings) -> LoadEngine:
    return cast("LoadEngine", import_module(f"gpumond.features.loadgen.backends.{name}").engine(settings))
