"""An event loop whose clock advances by each wait, which takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def time(self) -> float:
        return self._own.now


def run(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return the result of ``work`` and the seconds that it waited."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work), loop.time()
    finally:
        loop.close()
