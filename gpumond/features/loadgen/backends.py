"""Backends that execute plans in real time: a simulated device, and CuPy, which is imported when it is opened."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.facts.errors import ConfigError, GpumondError
from gpumond.facts.units import plural, size_text
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import Context, DamagedDeviceError, OutOfMemory, SimDevice


class AllocationRefused(GpumondError):
    """The backend cannot execute the plan; nothing was allocated. The message states the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of backends. ``sim_directory``: that of the simulated device."""

    device: int = 0
    sim_directory: Path | None = None


@dataclass(frozen=True, slots=True)
class BackendCapacity:
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
        self._limit_bytes: int | None = None

    @abstractmethod
    def open(self) -> BackendCapacity:
        """Attach to the device. Raises AllocationRefused, ConfigError."""

    @abstractmethod
    def set_limit(self, size_bytes: int) -> None:
        """Set the upper limit of allocations, caches included."""

    @abstractmethod
    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        """Allocate a block. Raises MemoryError when the device is full or the limit is reached, and changes nothing."""

    @abstractmethod
    def free(self, block: int) -> None: ...

    @abstractmethod
    def set_busy(self, ratio: float) -> None:
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

    def _check_limit(self, size_bytes: int) -> None:
        """Raise MemoryError if an allocation outside the pool would exceed the limit."""
        total = self.held_bytes() + size_bytes
        if self._limit_bytes is not None and total > self._limit_bytes:
            raise MemoryError(f"{size_text(total)} would exceed the limit of {size_text(self._limit_bytes)}")

    def write(self, block: int) -> None:
        """Fill a block with its own pattern; only with ``has_contents``."""
        raise NotImplementedError

    def count_wrong_words(self, block: int) -> int:
        """Return the number of 8-byte words that differ from the pattern; only with ``has_contents``."""
        raise NotImplementedError

    def abandon(self) -> Path:
        """Leave all blocks without an owner until the returned file is removed; only with ``makes_orphans``."""
        raise NotImplementedError


BUSY_SLICE_SECONDS = 0.02
"""Length of one period of work; utilization counters sample a sixth of a second or more."""


class BusyThread:
    """The thread. ``work(amount)`` keeps the device busy for a time that grows with the amount, and blocks."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._ratio = 0.0
        self._ratio_changed = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def set_ratio(self, ratio: float) -> None:
        self._ratio = ratio
        if ratio > 0 and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpumond-loadgen", daemon=True)
            self._thread.start()
        self._ratio_changed.set()

    def stop(self) -> None:
        self._stopping = True
        self._ratio_changed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        amount = 1000
        while not self._stopping:
            ratio = self._ratio
            if ratio <= 0:
                self._ratio_changed.wait()
                self._ratio_changed.clear()
                continue
            started = time.perf_counter()
            self._work(amount)
            elapsed = max(1e-6, time.perf_counter() - started)
            amount = max(1, int(amount * min(2.0, max(0.5, BUSY_SLICE_SECONDS / elapsed))))
            self._ratio_changed.wait(elapsed * (1 / ratio - 1))
            self._ratio_changed.clear()


class SimBackend(LoadBackend):
    makes_orphans = True

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        if settings.sim_directory is None:
            raise ConfigError("the sim backend requires a simulated device: pass --sim-device DIR")
        self._device = SimDevice(settings.sim_directory)
        self._allocator: CachingAllocator | None = None
        self._context: Context | None = None
        self._blocks: dict[int, int] = {}
        self._outside: dict[int, int] = {}

    def open(self) -> BackendCapacity:
        try:
            self._context = self._device.attach()
            reading = self._device.read()
        except DamagedDeviceError as error:
            raise AllocationRefused(
                f"no simulated device: {error}; pass one with --sim-device, or start `gpumond demo`"
            ) from error
        except OutOfMemory as error:
            raise AllocationRefused(f"{error}; a context requires more memory") from error
        self._allocator = CachingAllocator(self._device)
        return BackendCapacity(reading.uuid, reading.size_bytes or 0, reading.free_bytes or 0)

    def set_limit(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._update_pool_limit()

    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        if not outside:
            self._blocks[block] = self._pool().malloc(size_bytes)
            return
        self._check_limit(size_bytes)
        self._attached().allocate(size_bytes)
        self._outside[block] = size_bytes
        self._update_pool_limit()

    def free(self, block: int) -> None:
        if block in self._blocks:
            self._pool().free(self._blocks.pop(block))
        else:
            self._attached().free(self._outside.pop(block))
            self._update_pool_limit()

    def set_busy(self, ratio: float) -> None:
        self._attached().set_utilization(ratio)

    def flush(self) -> int:
        return self._pool().empty_cache()

    def live_bytes(self) -> int:
        return self._pool().live_bytes + sum(self._outside.values())

    def held_bytes(self) -> int:
        return self._pool().held_bytes + sum(self._outside.values())

    def abandon(self) -> Path:
        return self._attached().abandon()

    def close(self) -> None:
        if self._allocator is not None:
            self._allocator.close()
        elif self._context is not None:
            self._context.close()
        self._context = self._allocator = None

    def _update_pool_limit(self) -> None:
        """Reduce the limit of the pool by the memory allocated outside it."""
        if self._limit_bytes is not None:
            self._pool().limit_bytes = self._limit_bytes - sum(self._outside.values())

    def _pool(self) -> CachingAllocator:
        assert self._allocator is not None
        return self._allocator

    def _attached(self) -> Context:
        assert self._context is not None
        return self._context


KERNELS = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
extern "C" __global__ void fill(unsigned long long *words, unsigned long long count, unsigned long long seed) {
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        words[i] = (i + seed) * 0x9E3779B97F4A7C15ull;
}
extern "C" __global__ void check(const unsigned long long *words, unsigned long long count, unsigned long long seed,
                                 unsigned long long *wrong) {
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        if (words[i] != (i + seed) * 0x9E3779B97F4A7C15ull) atomicAdd(wrong, 1ull);
}
"""
GRID, THREADS = 512, 256
CYCLES_PER_UNIT = 1000
"""One unit of the busy thread's work."""


class CupyBackend(LoadBackend):
    has_contents = True
    scratch_bytes = 1 << 20

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._blocks: dict[int, Any] = {}
        self._outside: dict[int, tuple[Any, int]] = {}
        self._wrong: Any = None
        self._cupy: Any = None
        self._kernels: Any = None
        self._busy_thread = BusyThread(self._spin)
        self._stream: Any = None

    def open(self) -> BackendCapacity:
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(
                f"the cupy backend needs CuPy ({error}): in a clone of gpumond's repository, run: pip install '.[cupy]'"
            ) from None
        runtime = cupy.cuda.runtime
        device = self._settings.device
        try:
            count = runtime.getDeviceCount()
            if device >= count:
                raise AllocationRefused(
                    f"there is no device {device}: CUDA finds {plural(count, 'GPU')}, and the first one is 0"
                )
            cupy.cuda.Device(device).use()
            free, size = runtime.memGetInfo()
        except runtime.CUDARuntimeError as error:
            raise AllocationRefused(f"CUDA can't be used: {error}; run `gpumond doctor` for details") from error
        self._cupy = cupy
        return BackendCapacity(cuda.device_uuid(device), int(size), int(free))

    def set_limit(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._update_pool_limit()
        self._wrong = self._cupy.zeros(1, dtype=self._cupy.uint64)

    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        if not outside:
            self._blocks[block] = self._cupy.cuda.alloc(size_bytes)
            return
        self._check_limit(size_bytes)
        memory = self._cupy.cuda.Memory(size_bytes)
        self._outside[block] = (self._cupy.cuda.MemoryPointer(memory, 0), size_bytes)
        self._update_pool_limit()

    def free(self, block: int) -> None:
        if self._blocks.pop(block, None) is None:
            del self._outside[block]
            self._update_pool_limit()

    def set_busy(self, ratio: float) -> None:
        self._busy_thread.set_ratio(ratio)

    def flush(self) -> int:
        pool = self._cupy.get_default_memory_pool()
        bytes_before = int(pool.total_bytes())
        pool.free_all_blocks()
        return bytes_before - int(pool.total_bytes())

    def live_bytes(self) -> int:
        return int(self._cupy.get_default_memory_pool().used_bytes()) + self._outside_bytes()

    def held_bytes(self) -> int:
        return int(self._cupy.get_default_memory_pool().total_bytes()) + self._outside_bytes()

    def write(self, block: int) -> None:
        pointer, count = self._words(block)
        self._kernel("fill")((GRID,), (THREADS,), (pointer, self._uint64(count), self._uint64(block)))

    def count_wrong_words(self, block: int) -> int:
        pointer, count = self._words(block)
        self._wrong.fill(0)
        self._kernel("check")((GRID,), (THREADS,), (pointer, self._uint64(count), self._uint64(block), self._wrong))
        return int(self._wrong[0])

    def close(self) -> None:
        self._busy_thread.stop()
        self._blocks.clear()
        self._outside.clear()
        self._wrong = None
        if self._cupy is not None:
            self._cupy.cuda.runtime.deviceSynchronize()
            self._cupy.get_default_memory_pool().free_all_blocks()

    def _update_pool_limit(self) -> None:
        """Reduce the limit of the pool by the memory allocated outside it."""
        if self._limit_bytes is not None:
            pool_limit = max(1, self._limit_bytes - self._outside_bytes())
            self._cupy.get_default_memory_pool().set_limit(size=pool_limit)

    def _outside_bytes(self) -> int:
        return sum(size for _, size in self._outside.values())

    def _words(self, block: int) -> tuple[Any, int]:
        memory = self._blocks[block] if block in self._blocks else self._outside[block][0]
        size = self._outside[block][1] if block in self._outside else memory.mem.size
        return self._uint64(memory.ptr), size // 8

    def _uint64(self, value: int) -> Any:
        return self._cupy.uint64(value)

    def _kernel(self, name: str) -> Any:
        if self._kernels is None:
            self._kernels = self._cupy.RawModule(code=KERNELS)
        return self._kernels.get_function(name)

    def _spin(self, amount: int) -> None:
        """Run one block, in the busy thread. It needs no memory of its own."""
        with self._cupy.cuda.Device(self._settings.device):
            if self._stream is None:
                self._stream = self._cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                self._kernel("spin")((1,), (1,), (self._cupy.int64(amount * CYCLES_PER_UNIT),))
            self._stream.synchronize()


BACKENDS: Mapping[str, type[LoadBackend]] = {"sim": SimBackend, "cupy": CupyBackend}
