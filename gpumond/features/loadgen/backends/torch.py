"""Backend that allocates through PyTorch's caching allocator, including blocks that a plan places outside it."""

from __future__ import annotations

from typing import Any

from gpumond.agent import cuda
from gpumond.facts.errors import ConfigError
from gpumond.features.loadgen.backends import AllocationRefused, BackendSettings, Burner, DeviceCapacity, LoadBackend

CHECKED_WORDS = 1 << 20
"""Words compared at once, because a comparison allocates memory."""

WORKING_NUMBERS = 1 << 22
"""Words for 16 MiB: one operation on them takes longer than its launch."""


class TorchBackend(LoadBackend):
    has_contents = True
    scratch_bytes = 32 << 20

    def __init__(self, settings: BackendSettings) -> None:
        super().__init__(settings)
        self._blocks: dict[int, Any] = {}
        self._torch: Any = None
        self._device: Any = None
        self._size_bytes = 0
        self._working: Any = None
        self._burner = Burner(self._compute)

    def open(self) -> DeviceCapacity:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"the torch backend needs PyTorch ({error}): pip install torch") from None
        device = self._settings.device
        if not torch.cuda.is_available():
            raise AllocationRefused(
                "PyTorch finds no CUDA device; run `gpumond doctor` for details, or use --backend sim, which needs none"
            )
        if device >= torch.cuda.device_count():
            raise AllocationRefused(f"there is no device {device}: use --device 0 to {torch.cuda.device_count() - 1}")
        torch.cuda.set_device(device)
        free, self._size_bytes = torch.cuda.mem_get_info(device)
        self._torch, self._device = torch, torch.device("cuda", device)
        return DeviceCapacity(cuda.device_uuid(device), self._size_bytes, free)

    def limit(self, size_bytes: int) -> None:
        fraction = min(1.0, size_bytes / self._size_bytes)
        self._torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def allocate(self, block: int, size_bytes: int, outside: bool) -> None:
        try:
            self._blocks[block] = self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def free(self, block: int) -> None:
        del self._blocks[block]

    def busy(self, ratio: float) -> None:
        if self._working is None and ratio > 0:
            try:
                self._working = self._torch.ones(WORKING_NUMBERS, device=self._device)
            except self._torch.cuda.OutOfMemoryError:
                return  # the plan's memory has priority
        if self._working is not None:
            self._burner.set(ratio)

    def flush(self) -> int:
        held = self.held_bytes()
        self._torch.cuda.empty_cache()
        return held - self.held_bytes()

    def live_bytes(self) -> int:
        return int(self._torch.cuda.memory_allocated(self._device))

    def held_bytes(self) -> int:
        return int(self._torch.cuda.memory_reserved(self._device))

    def write(self, block: int) -> None:
        self._words(block).fill_(block)

    def wrong_words(self, block: int) -> int:
        return sum(int((piece != block).sum()) for piece in self._words(block).split(CHECKED_WORDS))

    def close(self) -> None:
        self._burner.stop()
        self._working = None
        self._blocks.clear()
        if self._torch is not None:
            self._torch.cuda.synchronize(self._device)
            self._torch.cuda.empty_cache()

    def _words(self, block: int) -> Any:
        memory = self._blocks[block]
        return memory[: memory.numel() // 8 * 8].view(self._torch.int64)

    def _compute(self, amount: int) -> None:
        """Run one computation, in the burner's thread."""
        for _ in range(max(1, amount // 100)):
            self._working.sin_()
        self._torch.cuda.synchronize(self._device)
