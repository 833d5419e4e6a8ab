"""Backend that allocates through CuPy's memory pool or cudaMalloc. Kernels keep the device busy."""

from __future__ import annotations

from typing import Any

from gpumond.agent import cuda
from gpumond.facts.errors import ConfigError
from gpumond.features.loadgen.backends import AllocationRefused, BackendSettings, Burner, DeviceCapacity, LoadBackend

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
CYCLES = 1000
"""One unit of the burner's work."""


class CupyBackend(LoadBackend):
    has_contents = True
    scratch_bytes = 1 << 20

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._limit_bytes: int | None = None
        self._blocks: dict[int, Any] = {}
        self._outside: dict[int, tuple[Any, int]] = {}
        self._wrong: Any = None
        self._cupy: Any = None
        self._kernels: Any = None
        self._burner = Burner(self._spin)
        self._streams: list[Any] = []

    def open(self) -> DeviceCapacity:
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(f"the cupy backend needs CuPy ({error}): pip install 'gpumond[cupy]'") from None
        runtime = cupy.cuda.runtime
        device = self._settings.device
        try:
            if device >= runtime.getDeviceCount():
                raise AllocationRefused(
                    f"there is no device {device}: use --device 0 to {runtime.getDeviceCount() - 1}"
                )
            cupy.cuda.Device(device).use()
            free, size = runtime.memGetInfo()
        except runtime.CUDARuntimeError as error:
            raise AllocationRefused(f"CUDA can't be used: {error}; run `gpumond doctor` for details") from error
        self._cupy = cupy
        return DeviceCapacity(cuda.device_uuid(device), int(size), int(free))

    def limit(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        self._share_limit()
        self._wrong = self._cupy.zeros(1, dtype=self._cupy.uint64)

    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        if not outside and not self._settings.raw:
            self._blocks[block] = self._cupy.cuda.alloc(size_bytes)
            return
        if self._limit_bytes is not None and self.held_bytes() + size_bytes > self._limit_bytes:
            raise MemoryError(f"{size_bytes} bytes more than the limit of {self._limit_bytes}")
        memory = self._cupy.cuda.Memory(size_bytes)
        self._outside[block] = (self._cupy.cuda.MemoryPointer(memory, 0), size_bytes)
        self._share_limit()

    def free(self, block: int) -> None:
        if self._blocks.pop(block, None) is None:
            del self._outside[block]
            self._share_limit()

    def busy(self, ratio: float) -> None:
        self._burner.set(ratio)

    def flush(self) -> int:
        pool = self._cupy.get_default_memory_pool()
        held = int(pool.total_bytes())
        pool.free_all_blocks()
        return held - int(pool.total_bytes())

    def live_bytes(self) -> int:
        return int(self._cupy.get_default_memory_pool().used_bytes()) + self._outside_bytes()

    def held_bytes(self) -> int:
        return int(self._cupy.get_default_memory_pool().total_bytes()) + self._outside_bytes()

    def write(self, block: int) -> None:
        pointer, count = self._words(block)
        self._kernel("fill")((GRID,), (THREADS,), (pointer, self._number(count), self._number(block)))

    def wrong_words(self, block: int) -> int:
        pointer, count = self._words(block)
        self._wrong.fill(0)
        self._kernel("check")((GRID,), (THREADS,), (pointer, self._number(count), self._number(block), self._wrong))
        return int(self._wrong[0])

    def close(self) -> None:
        self._burner.stop()
        self._blocks.clear()
        self._outside.clear()
        self._wrong = None
        if self._cupy is not None:
            self._cupy.cuda.runtime.deviceSynchronize()
            self._cupy.get_default_memory_pool().free_all_blocks()

    def _share_limit(self) -> None:
        """Reduce the limit of the pool by the memory allocated outside it."""
        if self._limit_bytes is not None:
            left = max(1, self._limit_bytes - self._outside_bytes())
            self._cupy.get_default_memory_pool().set_limit(size=left)

    def _outside_bytes(self) -> int:
        return sum(size for _, size in self._outside.values())

    def _words(self, block: int) -> tuple[Any, int]:
        memory = self._blocks[block] if block in self._blocks else self._outside[block][0]
        size = self._outside[block][1] if block in self._outside else memory.mem.size
        return self._number(memory.ptr), size // 8

    def _number(self, value: int) -> Any:
        return self._cupy.uint64(value)

    def _kernel(self, name: str) -> Any:
        if self._kernels is None:
            self._kernels = self._cupy.RawModule(code=KERNELS)
        return self._kernels.get_function(name)

    def _spin(self, amount: int) -> None:
        """Run one block on each stream, in the burner's thread. It needs no memory of its own."""
        with self._cupy.cuda.Device(self._settings.device):
            if not self._streams:
                self._streams = [self._cupy.cuda.Stream(non_blocking=True) for _ in range(self._settings.streams)]
            for stream in self._streams:
                with stream:
                    self._kernel("spin")((1,), (1,), (self._cupy.int64(amount * CYCLES),))
            for stream in self._streams:
                stream.synchronize()
