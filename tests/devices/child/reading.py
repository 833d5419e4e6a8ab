"""Readings of the collector process for which a test waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpumond.devices.child.supervisor import Collector
from gpumond.facts.snapshot import Reading


async def read_until(collector: Collector, condition: Callable[[Reading], bool]) -> Reading:
    for _ in range(600):
        reading = await collector.read(wait=1.0)
        if reading is not None and condition(reading):
            return reading
        await asyncio.sleep(0.05)
    raise AssertionError("the condition did not come true in time")
