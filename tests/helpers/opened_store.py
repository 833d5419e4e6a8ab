"""Store that is open while a function works with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from gpumond.facts.frame import Alert
from gpumond.facts.pools import ExpectedRelease, PoolBytes, Receipt, StepResult
from gpumond.store.store import Store, StoreLimits

T = TypeVar("T")
RECEIPT = Receipt(
    pid=10,
    start_ticks=100,
    workload="train",
    device_uuid="GPU-a",
    allocator="torch",
    outcome="partial",
    reason="raced",
    expected=ExpectedRelease(1, 2, 3),
    released_bytes=-5,
    driver_released_bytes=None,
    before=PoolBytes(9, 4, 5, None),
    after=PoolBytes(14, 4, 0, 20),
    steps=(StepResult("cache", -5, 0.1, "x"),),
    raced=True,
    requested_by="token",
    started_at=1.5,
    duration_seconds=0.25,
    planned=ExpectedRelease(1, 2, 4, "interval"),
)


def with_store(
    path: Path, work: Callable[[Store], Awaitable[T]], bounds: StoreLimits = StoreLimits(), **options: Any
) -> T:
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
    return Alert(
        rule="full",
        phase="resolved",
        labels=(("alertname", name),),
        annotations=(),
        value=1.0,
        active_at=1.0,
        fired_at=2.0,
        resolved_at=time.time(),
    )
