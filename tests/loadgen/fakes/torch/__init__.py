"""Fake for PyTorch: the functions that the load generator uses."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from device import DEVICE, OTHERS, SIZE, Full, Pool

__version__ = "2.13.0"
uint8, int64, float32 = 1, 8, 4
POOL = Pool(DEVICE, 512)


class OutOfMemoryError(RuntimeError):
    pass


def device(kind: str, index: int) -> str:
    return f"{kind}:{index}"


class Tensor:
    """All elements have one value."""

    def __init__(self, count: int, width: int, owner: Tensor | None = None) -> None:
        self.count, self.width, self.owner = count, width, owner
        self.value: Any = None
        if owner is None:
            try:
                self.chunk = POOL.take(count * width)
            except Full:
                raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count * width} bytes") from None

    def __del__(self) -> None:
        if hasattr(self, "chunk"):
            POOL.give(self.chunk)

    def _root(self) -> Tensor:
        return self.owner._root() if self.owner else self

    def numel(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(part.stop, self.width, self)

    def view(self, width: int) -> Tensor:
        return Tensor(self.count * self.width // width, width, self)

    def fill_(self, value: int) -> None:
        self._root().value = value

    def split(self, count: int) -> list[Tensor]:
        return [Tensor(min(count, self.count - start), self.width, self) for start in range(0, self.count, count)]

    def __ne__(self, value: object) -> Tensor:  # type: ignore[override]
        different = Tensor(self.count, 1)  # a comparison allocates memory itself
        wrong = int(os.environ.get("FAKE_WRONG_WORDS", "0"))
        different.value = self.count if self._root().value != value else wrong
        return different

    __hash__ = None  # type: ignore[assignment]

    def sum(self) -> Any:
        return self.value

    def sin_(self) -> None:
        DEVICE.worked += 1


def empty(count: int, dtype: int, device: str) -> Tensor:
    return Tensor(count, dtype)


def ones(count: int, device: str) -> Tensor:
    return Tensor(count, float32)


def _limit(fraction: float, device: str) -> None:
    POOL.limit = int(fraction * SIZE)


cuda = SimpleNamespace(
    OutOfMemoryError=OutOfMemoryError,
    is_available=lambda: SIZE > 0,
    device_count=lambda: 1,
    set_device=lambda index: None,
    mem_get_info=lambda index: (SIZE - OTHERS - DEVICE.used, SIZE),
    set_per_process_memory_fraction=_limit,
    memory_allocated=lambda device: POOL.live,
    memory_reserved=lambda device: POOL.held,
    empty_cache=POOL.empty,
    synchronize=lambda device: None,
)
