"""The collector starts its process again, whatever the number of failures."""

from __future__ import annotations

import asyncio
import os

from gpumond.devices.child.supervisor import Collector, backoff
from tests.devices.child.reading import read_until
from tests.fakenvml import FakeDriver, machine


def test_process_that_cannot_be_started_is_started_later(driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    environ = {**os.environ, **driver.env, "TOO_LONG": "x" * (1 << 20)}  # the kernel does not start such a process

    async def run() -> None:
        collector = Collector("nvml", environ=environ)
        descriptors = os.listdir("/proc/self/fd")
        collector.start()
        try:
            assert (collector.state.up, collector.state.reason, collector.pid) == (False, "crashed", None)
            assert "cannot be started: [Errno 7] Argument list too long" in collector.state.detail
            assert os.listdir("/proc/self/fd") == descriptors
            del environ["TOO_LONG"]
            await read_until(collector, lambda reading: bool(reading.devices))
            assert collector.state.up
        finally:
            await collector.stop()

    asyncio.run(run())


def test_delay_doubles_up_to_the_longest_for_any_number_of_failures():
    assert [backoff(1.0, failures, 30.0) for failures in (-2, 0, 1, 4, 5, 10_000)] == [1.0, 1.0, 2.0, 16.0, 30.0, 30.0]
