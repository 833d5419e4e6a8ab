"""Backends that execute plans in real time.

To add one, write a module ``NAME`` here with a subclass of `LoadBackend`, and add it to ``BACKENDS``. A library is
imported when its backend is opened, not before.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumond.facts.errors import GpumondError
from gpumond.feature import resolve

BACKENDS: Mapping[str, str] = {"sim": "SimBackend", "cupy": "CupyBackend", "torch": "TorchBackend"}
"""Name and class of each: on a simulated device, in CuPy's pool or with cudaMalloc, in PyTorch's caching allocator."""


class AllocationRefused(GpumondError):
    """The backend cannot execute the plan; nothing was allocated. The message states the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of backends. ``sim_directory``: that of the simulated device. ``raw``: allocate outside CuPy's pool."""

    device: int = 0
    sim_directory: Path | None = None
    raw: bool = False
    streams: int = 1


@dataclass(frozen=True, slots=True)
class DeviceCapacity:
    """Size and free memory of a device in its framework, with this program's context."""

    device_uuid: str | None
    size_bytes: int
    free_bytes: int


class LoadBackend(ABC):
    """A backend. Blocks are identified by the plan's numbers. All calls are from one thread."""

    has_contents = False
    """Blocks can be written and checked."""
    makes_orphans = False
    scratch_bytes = 0
    """Part of the limit that the backend needs itself."""

    def __init__(self, settings: BackendSettings) -> None:
        self._settings = settings

    @abstractmethod
    def open(self) -> DeviceCapacity:
        """Attach to the device. Raises AllocationRefused, ConfigError."""

    @abstractmethod
    def limit(self, size_bytes: int) -> None:
        """Set the upper limit of allocations, caches included."""

    @abstractmethod
    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        """Allocate a block. Raises MemoryError when the device is full or the limit is reached, and changes nothing."""

    @abstractmethod
    def free(self, block: int) -> None: ...

    @abstractmethod
    def busy(self, ratio: float) -> None:
        """Keep the device busy for this share of the time."""

    @abstractmethod
    def flush(self) -> int:
        """Return the cache to the device. Returns the bytes released."""

    @abstractmethod
    def live_bytes(self) -> int: ...

    @abstractmethod
    def held_bytes(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Free all blocks."""

    def write(self, block: int) -> None:
        """Fill a block with its own pattern; only with ``has_contents``."""
        raise NotImplementedError

    def wrong_words(self, block: int) -> int:
        """Return the number of 8-byte words that differ from the pattern; only with ``has_contents``."""
        raise NotImplementedError

    def abandon(self) -> Path:
        """Leave all blocks without an owner until the returned file is removed; only with ``makes_orphans``."""
        raise NotImplementedError


def backend(name: str, settings: BackendSettings) -> LoadBackend:
    made: LoadBackend = resolve(f"gpumond.features.loadgen.backends.{name}:{BACKENDS[name]}")(settings)
    return made


SLICE_SECONDS = 0.02
"""Length of one period of work; utilization counters sample a sixth of a second or more."""


class Burner:
    """The thread. ``work(amount)`` keeps the device busy for a time that grows with the amount, and blocks."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._ratio = 0.0
        self._change = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def set(self, ratio: float) -> None:
        self._ratio = ratio
        if ratio > 0 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumond-loadgen", daemon=True)
            self._thread.start()
        self._change.set()

    def stop(self) -> None:
        self._stopping = True
        self._change.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        amount = 1000
        while not self._stopping:
            ratio = self._ratio
            if ratio <= 0:
                self._change.wait()
                self._change.clear()
                continue
            started = time.perf_counter()
            self._work(amount)
            took = max(1e-6, time.perf_counter() - started)
            amount = max(1, int(amount * min(2.0, max(0.5, SLICE_SECONDS / took))))
            self._change.wait(took * (1 / ratio - 1))
            self._change.clear()
