"""Fake for comfy-aimdo 0.6: reservations of addresses, whose pages are mapped when they are used."""

from __future__ import annotations

PAGE = 32 << 20
mapped: dict[int, int] = {}
"""Pages of each reservation. One that is freed is not there anymore, as its memory in aimdo."""


class ModelVBAR:
    def __init__(self, size: int, device: int, pageout_callback: object = None) -> None:
        self._devctx = 100 + device
        self._ptr: int | None = len(mapped) + 1
        self.device = device
        mapped[self._ptr] = 0

    def fault(self, pages: int) -> None:
        assert self._ptr is not None
        mapped[self._ptr] += pages

    def loaded_size(self) -> int:
        assert self._ptr is not None
        return mapped[self._ptr] * PAGE

    def close(self) -> None:
        if self._ptr:
            mapped.pop(self._ptr)
            self._ptr = None

    def __del__(self) -> None:
        self.close()
