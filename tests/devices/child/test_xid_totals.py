"""A counter of XID errors never decreases, even if the counting process exits."""

from __future__ import annotations

import asyncio
import os

import pytest

from gpumond.devices.child.supervisor import Collector, add_up
from gpumond.facts.snapshot import Reading, XidErrors
from tests.devices.child.reading import read_until
from tests.fakenvml import FakeDriver, machine

XID = 8


def test_errors_of_successive_children_are_added():
    first = (XidErrors("GPU-a", 79, 2, 10.0), XidErrors("GPU-a", 31, 1, 11.0))
    second = (XidErrors("GPU-a", 79, 1, 20.0), XidErrors("GPU-b", 79, 1, 21.0))
    assert set(add_up(first, second)) == {
        XidErrors("GPU-a", 79, 3, 20.0),
        XidErrors("GPU-a", 31, 1, 11.0),
        XidErrors("GPU-b", 79, 1, 21.0),
    }
    assert add_up((), second) == second


def count(reading: Reading) -> int:
    return sum(errors.count for errors in reading.xids if errors.xid == 79)


@pytest.mark.parametrize("end", ["crash", "hang and return", "hang and be replaced"])
def test_total_survives_the_child_that_counted(driver: FakeDriver, end: str):
    driver.devices = machine(2)
    driver.write()
    environ = {**os.environ, **driver.env}
    replace_after = 0.2 if end == "hang and be replaced" else 60.0

    async def run() -> list[int]:
        collector = Collector("nvml", deadline=0.6, replace_after=replace_after, environ=environ)
        collector.start()
        try:
            await read_until(collector, lambda reading: bool(reading.devices))
            driver.devices[0].events = [(XID, 79), (XID, 79)]
            driver.write()
            first = await read_until(collector, lambda reading: count(reading) >= 2)
            driver.devices[0].events = []
            if end == "crash":
                driver.crash("nvmlDeviceGetMemoryInfo_v2")
            else:
                seconds = 1.5 if end == "hang and return" else 6.0
                driver.hang("nvmlDeviceGetMemoryInfo_v2", 0, seconds=seconds, times=1)
            driver.write()
            while (await collector.read(wait=2.0)) is not None:
                pass
            driver.heal()
            driver.devices[0].events = [(XID, 79)]
            driver.write()
            second = await read_until(collector, lambda reading: count(reading) != count(first))
            return [count(first), count(second)]
        finally:
            await collector.stop()

    assert asyncio.run(run()) == [2, 3]
