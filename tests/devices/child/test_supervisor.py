"""The supervisor and its child: counters of Xid errors, restarts, and the end of a stopped child."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.devices.child.supervisor import Supervisor, sum_xid_errors
from gpumond.facts.snapshot import Reading, XidErrors
from gpumond.facts.units import backoff_seconds
from gpumond.sim.device import MIB, DeviceSpec, create
from tests.fakenvml import FakeDriver, machine
from tests.helpers.running import RunningDaemon, until


async def read_until(supervisor: Supervisor, condition: Callable[[Reading], bool]) -> Reading:
    for _ in range(600):
        reading = await supervisor.read(wait=1.0)
        if reading is not None and condition(reading):
            return reading
        await asyncio.sleep(0.05)
    raise AssertionError("the condition did not come true in time")


Xid = 8


def test_errors_of_successive_children_are_added():
    first = (XidErrors("GPU-a", 79, 2, 10.0), XidErrors("GPU-a", 31, 1, 11.0))
    second = (XidErrors("GPU-a", 79, 1, 20.0), XidErrors("GPU-b", 79, 1, 21.0))
    assert set(sum_xid_errors(first, second)) == {
        XidErrors("GPU-a", 79, 3, 20.0),
        XidErrors("GPU-a", 31, 1, 11.0),
        XidErrors("GPU-b", 79, 1, 21.0),
    }
    assert sum_xid_errors((), second) == second


def count(reading: Reading) -> int:
    return sum(errors.count for errors in reading.xids if errors.xid == 79)


@pytest.mark.parametrize("end", ["crash", "hang and return", "hang and be replaced"])
def test_total_survives_the_child_that_counted(driver: FakeDriver, end: str):
    driver.devices = machine(2)
    driver.write()
    environ = {**os.environ, **driver.env}
    replace_after_seconds = 0.2 if end == "hang and be replaced" else 60.0

    async def run() -> list[int]:
        supervisor = Supervisor(
            "nvml", deadline_seconds=0.6, replace_after_seconds=replace_after_seconds, environ=environ
        )
        supervisor.start()
        try:
            await read_until(supervisor, lambda reading: bool(reading.devices))
            driver.devices[0].events = [(Xid, 79), (Xid, 79)]
            driver.write()
            first = await read_until(supervisor, lambda reading: count(reading) >= 2)
            driver.devices[0].events = []
            if end == "crash":
                driver.crash("nvmlDeviceGetMemoryInfo_v2")
            else:
                seconds = 1.5 if end == "hang and return" else 6.0
                driver.hang("nvmlDeviceGetMemoryInfo_v2", 0, seconds=seconds, times=1)
            driver.write()
            while (await supervisor.read(wait=2.0)) is not None:
                pass
            driver.heal()
            driver.devices[0].events = [(Xid, 79)]
            driver.write()
            second = await read_until(supervisor, lambda reading: count(reading) != count(first))
            return [count(first), count(second)]
        finally:
            await supervisor.stop()

    assert asyncio.run(run()) == [2, 3]


def test_process_that_cannot_be_started_is_started_later(driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()
    environ = {**os.environ, **driver.env, "TOO_LONG": "x" * (1 << 20)}  # the kernel does not start such a process

    async def run() -> None:
        supervisor = Supervisor("nvml", environ=environ)
        descriptors = os.listdir("/proc/self/fd")
        supervisor.start()
        try:
            assert (supervisor.state.up, supervisor.state.reason, supervisor.pid) == (False, "crashed", None)
            assert "can't be started: [Errno 7] Argument list too long" in supervisor.state.detail
            assert os.listdir("/proc/self/fd") == descriptors
            del environ["TOO_LONG"]
            await read_until(supervisor, lambda reading: bool(reading.devices))
            assert supervisor.state.up
        finally:
            await supervisor.stop()

    asyncio.run(run())


def test_delay_doubles_up_to_the_longest_for_any_number_of_failures():
    assert [backoff_seconds(1.0, failures, 30.0) for failures in (-2, 0, 1, 4, 5, 10_000)] == [
        1.0,
        1.0,
        2.0,
        16.0,
        30.0,
        30.0,
    ]


def readings() -> int:
    gc.collect()
    return sum(type(each) is Reading for each in gc.get_objects())


def test_deadline_does_not_keep_a_reading(driver: FakeDriver):
    driver.devices = machine(1)
    driver.write()

    async def run() -> None:
        supervisor = Supervisor("nvml", deadline_seconds=60, environ={**os.environ, **driver.env})
        supervisor.start()
        before = readings()
        try:
            for _ in range(3):
                assert await supervisor.read(wait=60.0) is not None
            assert readings() == before
        finally:
            await supervisor.stop()

    asyncio.run(run())


def child_of(daemon: RunningDaemon) -> int:
    pid = daemon.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert b"gpumond.devices.child.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    return int(child)


def state(pid: int) -> str:
    """Return the state in /proc: T is stopped; Z, or nothing, is exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_child_ends_with_the_daemon(serve: Callable[..., RunningDaemon], tmp_path: Path, end: signal.Signals):
    create(tmp_path / "sim" / "card0", DeviceSpec("GPU-simulated", 0, "sim", 1024 * MIB))
    daemon = serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "sim")})
    until(lambda: daemon.request("/-/ready")[0] == 200)
    child = child_of(daemon)
    os.kill(child, signal.SIGSTOP)
    until(lambda: state(child) == "T")
    daemon.process.send_signal(end)
    daemon.process.wait(timeout=20)
    until(lambda: state(child) in ("", "Z"))
