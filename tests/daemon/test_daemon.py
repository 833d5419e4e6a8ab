"""Daemon process over the fake driver library, queried over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakenvml import FakeDriver, machine
from tests.helpers.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """64 running processes."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(64)]
    yield [sleeper.pid for sleeper in sleepers]
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def start(serve: Serve, driver: FakeDriver, *options: str) -> RunningDaemon:
    driver.write()
    daemon = serve("--source", "nvml", *options, environ=driver.env)
    until(lambda: daemon.value("gpumond_driver_up"))
    return daemon


def test_metrics_equal_the_values_of_the_driver_exactly(serve: Serve, driver: FakeDriver, pids: list[int]):
    driver.devices = machine(8, pids=pids)
    daemon = start(serve, driver)
    assert daemon.request("/-/ready")[0] == 200
    series = daemon.series()
    for index, device in enumerate(driver.devices):
        own = {"uuid": device.uuid, "gpu": str(index)}
        free = device.total_bytes - device.reserved_bytes - device.used_bytes
        expected = {
            ("memory_size_bytes", device.total_bytes),
            ("memory_used_bytes", device.used_bytes),
            ("memory_free_bytes", device.free_bytes if device.free_bytes is not None else free),
            ("memory_reserved_bytes", device.reserved_bytes),
            ("gpu_utilization_ratio", device.gpu_utilization / 100),
            ("memory_controller_utilization_ratio", device.memory_utilization / 100),
            ("sm_clock_hertz", device.sm_clock * 1e6),
            ("memory_clock_hertz", device.memory_clock * 1e6),
            ("power_watts", device.power / 1000),
            ("energy_joules_total", device.energy / 1000),
            ("up", 1),
        }
        for name, value in expected:
            assert series[f"gpumond_device_{name}", frozenset(own.items())] == value, (name, index)
        temperature = frozenset({**own, "sensor": "gpu"}.items())
        assert series["gpumond_device_temperature_celsius", temperature] == device.temperature
        for process in device.processes:
            labels = frozenset({**own, "pid": str(process.pid)}.items())
            assert series["gpumond_process_memory_used_bytes", labels] == process.used_bytes
        ledger = sum(
            value
            for (name, labels), value in series.items()
            if name == "gpumond_memory_bytes" and ("uuid", device.uuid) in labels
        )
        assert ledger == device.used_bytes + series["gpumond_memory_overcount_bytes", frozenset(own.items())]


def test_lost_device_has_no_values_until_it_is_back_and_others_continue(serve: Serve, driver: FakeDriver):
    driver.devices = machine(4)
    daemon = start(serve, driver, "--interval", "0.2s")
    lost, other = driver.devices[1].uuid, driver.devices[2].uuid
    driver.lose(1)
    driver.devices[2].used_bytes += 4096
    driver.write()
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", uuid=other) == driver.devices[2].used_bytes)
    until(lambda: daemon.value("gpumond_device_up", uuid=lost) == 0)
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", uuid=lost) is None)
    assert daemon.value("gpumond_device_info", uuid=lost) == 1
    until(lambda: daemon.value("gpumond_device_up", uuid=other) == 1)
    driver.heal()
    driver.write()
    until(lambda: daemon.value("gpumond_device_up", uuid=lost) == 1)
    assert daemon.value("gpumond_device_memory_used_bytes", uuid=lost) == driver.devices[1].used_bytes


def test_commands_wait_for_the_first_reading(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.hang("nvmlDeviceGetCount_v2", seconds=1.5, times=1)
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "10s", environ=driver.env)
    status, _, headers = daemon.request("/api/v1/frame")
    assert (status, headers.get("Retry-After")) in ((503, "1"), (200, None))  # a slow machine has read them by now
    done = daemon.run("status")
    assert (done.returncode, done.stderr) == (0, "")


def test_hanging_driver_withdraws_values_until_it_is_back(serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    daemon = start(serve, driver)
    driver.hang("nvmlDeviceGetCount_v2", seconds=20, times=1)
    driver.write()
    until(lambda: daemon.value("gpumond_driver_responsive") == 0)
    assert daemon.value("gpumond_driver_down_reason", reason="timeout")
    assert not [name for name, _ in daemon.series() if name.startswith("gpumond_device_memory")]
    assert daemon.request("/-/healthy")[0] == 200
    assert daemon.request("/-/ready")[0] == 503
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="0"), 40)
    assert daemon.value("gpumond_driver_responsive") == 1


def test_hanging_device_is_excluded_and_others_continue(serve: Serve, driver: FakeDriver):
    driver.devices = machine(3)
    daemon = start(serve, driver)
    driver.hang("*", 1, seconds=12)
    driver.write()
    until(lambda: daemon.value("gpumond_driver_responsive") == 0)
    driver.heal()
    driver.devices[2].used_bytes += 4096
    driver.write()
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="2") == driver.devices[2].used_bytes)
    assert daemon.value("gpumond_device_up", gpu="1") == 0
    assert daemon.value("gpumond_device_memory_used_bytes", gpu="1") is None
    assert daemon.value("gpumond_driver_up") == 1
    until(lambda: daemon.value("gpumond_device_up", gpu="1") == 1)
    assert daemon.value("gpumond_driver_responsive") == 1


def test_device_that_crashes_the_driver_repeatedly_is_excluded(serve: Serve, driver: FakeDriver):
    driver.devices = machine(3)
    daemon = start(serve, driver, "--interval", "0.2s")
    driver.crash("nvmlDeviceGetMemoryInfo_v2", 1)
    driver.write()
    until(lambda: daemon.value("gpumond_device_fault", gpu="1", kind="skipped"))
    assert daemon.value("gpumond_device_memory_used_bytes", gpu="2") == driver.devices[2].used_bytes
    assert daemon.value("gpumond_device_up", gpu="1") == 0


def test_release_ends_the_driver_process_until_it_expires(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    daemon = start(serve, driver, "--interval", "0.2s")
    held = subprocess.run(["pgrep", "-P", str(daemon.process.pid)], capture_output=True, text=True).stdout.split()
    assert len(held) == 1
    assert daemon.run("detach-driver", "--for", "3s").returncode == 0
    assert not subprocess.run(["pgrep", "-P", str(daemon.process.pid)], capture_output=True).stdout
    until(lambda: daemon.value("gpumond_driver_down_reason", reason="released"))
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="0") is None)
    assert not {"driver-down", "device-lost"} & {alert["rule"] for alert in daemon.get("alerts")}
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="0"))
    daemon.process.send_signal(signal.SIGUSR1)
    until(lambda: daemon.value("gpumond_driver_down_reason", reason="released"))


def test_driver_crash_restarts_the_collector_process_only(serve: Serve, driver: FakeDriver):
    driver.devices = machine(2)
    daemon = start(serve, driver, "--interval", "0.2s")
    driver.crash("nvmlDeviceGetMemoryInfo_v2", 1)
    driver.write()
    until(lambda: (daemon.value("gpumond_collector_restarts_total") or 0) >= 2)
    driver.heal()
    driver.devices[1].used_bytes += 4096
    driver.write()
    until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="1") == driver.devices[1].used_bytes)
    assert daemon.process.poll() is None


def test_metrics_contain_the_processes_of_the_daemon_and_of_its_collector(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    daemon = start(serve, driver)
    driver.write()
    until(lambda: daemon.value("gpumond_driver_up"))
    (collector,) = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    assert daemon.value("process_resident_memory_bytes")
    assert daemon.value("gpumond_collector_process_resident_memory_bytes")
    own, its = (started(pid) for pid in (daemon.process.pid, int(collector)))
    assert daemon.value("process_start_time_seconds") == own
    assert daemon.value("gpumond_collector_process_start_time_seconds") == its
    assert [name for name, _ in daemon.series() if name == "python_info"] == ["python_info"]


def started(pid: int) -> float:
    """Return the unix time at which a process began."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def test_driver_that_loads_later_is_found(serve: Serve, driver: FakeDriver):
    driver.devices = machine(1)
    driver.fail("nvmlInit_v2", code=9)
    driver.fail("nvmlInitWithFlags", code=9)
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    until(lambda: daemon.value("gpumond_driver_down_reason", reason="driver_not_loaded"))
    driver.heal()
    driver.write()
    until(lambda: daemon.value("gpumond_device_up", gpu="0"))


@pytest.mark.parametrize("state", ["idle", "hanging", "never opened"])
def test_sigterm_ends_the_daemon_in_order_in_each_state_of_the_driver(serve: Serve, driver: FakeDriver, state: str):
    driver.devices = machine(1)
    if state == "never opened":
        driver.hang("nvmlInitWithFlags")
        driver.hang("nvmlInit_v2")
    driver.write()
    daemon = serve("--source", "nvml", environ=driver.env)
    if state != "never opened":
        until(lambda: daemon.value("gpumond_driver_up"))
    if state == "hanging":
        driver.hang()
        driver.write()
        until(lambda: daemon.value("gpumond_device_memory_used_bytes", gpu="0") is None)
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
