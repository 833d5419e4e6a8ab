"""Store that is open while a function works with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from gpumond.model.frame import Alert
from gpumond.model.pools import Expected, Held, Receipt, StepResult
from gpumond.store import Bounds, Store

T = TypeVar("T")
RECEIPT = Receipt(
    10,
    "train",
    "GPU-a",
    "torch",
    "partial",
    "raced",
    Expected(1, 2, 3),
    -5,
    None,
    Held(9, 4, 5, None),
    Held(14, 4, 0, 20),
    (StepResult("cache", -5, 0.1, "x"),),
    True,
    "token",
    1.5,
    0.25,
    Expected(1, 2, 4, "interval"),
)


def with_store(path: Path, work: Callable[[Store], Awaitable[T]], bounds: Bounds = Bounds(), **options: Any) -> T:
    async def run() -> T:
        store = Store(path, bounds, **options)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def over(name: str) -> Alert:
    """Return an alert that has just ended."""
    return Alert("full", "resolved", (("alertname", name),), (), 1.0, 1.0, 2.0, time.time())
