"""A reading is freed when its tick is over. At 64 processes on each of 8 devices, one takes 0.2 MiB."""

from __future__ import annotations

import asyncio
import gc
import os

from gpumond.devices.child.supervisor import Supervisor
from gpumond.facts.snapshot import Reading
from tests.fakenvml import FakeDriver, machine


def readings() -> int:
    gc.collect()
    return sum(type(each) is Reading for each in gc.get_objects())


def test_deadline_does_not_keep_a_reading(driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()

    async def run() -> None:
        supervisor = Supervisor("nvml", deadline=60, environ={**os.environ, **driver.env})
        supervisor.start()
        before = readings()
        try:
            for _ in range(3):
                assert await supervisor.read(wait=60.0) is not None
            assert readings() == before
        finally:
            await supervisor.stop()

    asyncio.run(run())
