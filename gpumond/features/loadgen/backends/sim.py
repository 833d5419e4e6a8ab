"""Backend that allocates on a simulated device (gpumond.sim), whose memory has no contents."""

from __future__ import annotations

from pathlib import Path

from gpumond.facts.errors import ConfigError
from gpumond.features.loadgen.backends import AllocationRefused, BackendSettings, DeviceCapacity, LoadBackend
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import Context, Damaged, OutOfMemory, SimDevice


class SimBackend(LoadBackend):
    makes_orphans = True

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        if settings.sim_directory is None:
            raise ConfigError("the sim backend requires a simulated device: pass --sim-device DIR")
        self._device = SimDevice(settings.sim_directory)
        self._allocator: CachingAllocator | None = None
        self._context: Context | None = None
        self._limit_bytes: int | None = None
        self._blocks: dict[int, int] = {}
        self._outside: dict[int, int] = {}

    def open(self) -> DeviceCapacity:
        try:
            self._context = self._device.attach()
            reading = self._device.read()
        except Damaged as error:
            raise AllocationRefused(
                f"no simulated device: {error}; pass one with --sim-device, or start `gpumond demo`"
            ) from error
        except OutOfMemory as error:
            raise AllocationRefused(f"{error}; a context requires more memory") from error
        self._allocator = CachingAllocator(self._device)
        return DeviceCapacity(reading.uuid, reading.size_bytes or 0, reading.free_bytes or 0)

    def limit(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._share_limit()

    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        if not outside:
            self._blocks[block] = self._pool().malloc(size_bytes)
            return
        if self._limit_bytes is not None and self.held_bytes() + size_bytes > self._limit_bytes:
            raise OutOfMemory(f"{size_bytes} bytes more than the limit of {self._limit_bytes}")
        self._attached().allocate(size_bytes)
        self._outside[block] = size_bytes
        self._share_limit()

    def free(self, block: int) -> None:
        if block in self._blocks:
            self._pool().free(self._blocks.pop(block))
        else:
            self._attached().free(self._outside.pop(block))
            self._share_limit()

    def busy(self, ratio: float) -> None:
        self._attached().busy(ratio)

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

    def _share_limit(self) -> None:
        """Reduce the limit of the pool by the memory allocated outside it."""
        if self._limit_bytes is not None:
            self._pool().limit_bytes = self._limit_bytes - sum(self._outside.values())

    def _pool(self) -> CachingAllocator:
        assert self._allocator is not None
        return self._allocator

    def _attached(self) -> Context:
        assert self._context is not None
        return self._context
