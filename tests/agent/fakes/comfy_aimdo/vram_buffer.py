from __future__ import annotations


class VRAMBuffer:
    def __init__(self, max_size: int, device: int) -> None:
        self.device = device
        self._allocated = 0

    def get(self, size: int) -> None:
        self._allocated = size

    def size(self) -> int:
        return self._allocated

    def __del__(self) -> None:
        pass
