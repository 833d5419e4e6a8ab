from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpumond.facts.snapshot import Sensors
from gpumond.sim.device import (
    MIB,
    Context,
    DamagedDeviceError,
    DeviceSpec,
    OutOfMemory,
    SimDevice,
    create,
    simulated_devices,
    start_if_running,
)
from tests.helpers.holding import holder, run, small_device


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return small_device(tmp_path)


@pytest.fixture
def context(device: SimDevice) -> Iterator[Context]:
    context = device.attach()
    yield context
    context.close()


def test_attaching_costs_the_context(device: SimDevice, context: Context) -> None:
    context.allocate(100 * MIB)
    reading = device.read()
    assert reading.processes is not None
    assert [(p.pid, p.start_ticks, p.used_bytes) for p in reading.processes] == [
        (os.getpid(), start_if_running(os.getpid()), 116 * MIB)
    ]
    assert (reading.used_bytes, reading.reserved_bytes, reading.free_bytes) == (116 * MIB, 24 * MIB, 884 * MIB)


def test_process_has_one_context_per_device(device: SimDevice, context: Context) -> None:
    assert SimDevice(device.directory).attach() is context


def test_closing_a_context_frees_its_memory(device: SimDevice) -> None:
    context = device.attach()
    context.allocate(MIB)
    context.close()
    reading = device.read()
    assert (reading.used_bytes, reading.processes) == (0, ())
    with pytest.raises(ValueError, match="closed"):
        context.allocate(MIB)


def test_out_of_memory_changes_nothing(device: SimDevice, context: Context) -> None:
    context.allocate(900 * MIB)
    with pytest.raises(OutOfMemory, match=r"84\.00 MiB free"):
        context.allocate(84 * MIB + 1)
    assert device.read().used_bytes == 916 * MIB
    context.allocate(84 * MIB)
    assert device.read().free_bytes == 0


def test_context_that_does_not_fit_is_out_of_memory(device: SimDevice) -> None:
    with holder(device, 980 * MIB):
        with pytest.raises(OutOfMemory):
            device.attach()
        processes = device.read().processes
    assert processes is not None
    assert os.getpid() not in [process.pid for process in processes]


def test_free_of_more_than_allocated_is_refused(context: Context) -> None:
    context.allocate(MIB)
    with pytest.raises(ValueError, match="can't free"):
        context.free(2 * MIB)


def test_killed_process_holds_nothing_even_as_a_zombie(device: SimDevice) -> None:
    with holder(device, 500 * MIB) as process:
        assert device.read().used_bytes == 516 * MIB
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert device.read().used_bytes == 0
    assert list((device.directory / "processes").iterdir()) == []


def test_memory_of_a_killed_process_can_be_allocated_at_once(device: SimDevice, context: Context) -> None:
    with holder(device, 900 * MIB) as process:
        with pytest.raises(OutOfMemory):
            context.allocate(500 * MIB)
        process.kill()
        process.wait()
        context.allocate(500 * MIB)


def test_reused_pid_is_another_process(device: SimDevice) -> None:
    (device.directory / "processes" / f"{os.getpid()}-1").write_text("[1048576, null, null, null]")
    assert device.read().processes == ()


def test_process_name_with_brackets_and_spaces_is_read(device: SimDevice, tmp_path: Path) -> None:
    python = tmp_path / "x) Z 1 (y"
    python.symlink_to(sys.executable)
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_if_running(process.pid) is not None
        process.kill()


CONTEND = """
import sys
from gpumond.sim.device import MIB, SimDevice, OutOfMemory
context = SimDevice(sys.argv[1]).attach()
print("attached", flush=True)
sys.stdin.readline()
try:
    while True:
        context.allocate(MIB // 8)
        context.allocate(MIB // 8)
        context.free(MIB // 8)
except OutOfMemory:
    print(context.used_bytes, flush=True)
sys.stdin.read()
"""


def test_contending_processes_hold_exactly_the_capacity(device: SimDevice) -> None:
    with ExitStack() as running:
        contenders = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CONTEND, str(device.directory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(3)
        ]
        pipes = [(c.stdin, c.stdout) for c in contenders if c.stdin is not None and c.stdout is not None]
        assert [output.readline() for _, output in pipes] == ["attached\n"] * 3
        for go, _ in pipes:
            go.write("go\n")
            go.flush()
        held = [int(output.readline()) for _, output in pipes]
        reading = device.read()
        for go, _ in pipes:
            go.close()
    assert (reading.used_bytes, reading.free_bytes) == (sum(held), 0)


FORK = """
import os, sys
from gpumond.sim.device import MIB, SimDevice
device = SimDevice(sys.argv[1])
inherited = device.attach()
inherited.allocate(10 * MIB)
if os.fork() == 0:
    try:
        inherited.allocate(MIB)
    except ValueError:
        device.attach().allocate(5 * MIB)
        print(sorted(p.used_bytes // MIB for p in device.read().processes), flush=True)
    os._exit(0)
os.wait()
print([p.used_bytes // MIB for p in device.read().processes])
"""


def test_forked_child_attaches_as_itself(device: SimDevice) -> None:
    assert run(FORK, str(device.directory)).split("\n")[:2] == ["[21, 26]", "[26]"]


def test_published_utilization_is_summed(tmp_path: Path) -> None:
    spec = DeviceSpec("SIM-warm", 0, "Simulated", 1024 * MIB, context_bytes=0, idle_celsius=30.0, idle_watts=20.0)
    device = create(tmp_path / "warm", spec)
    assert device.read().sensors == Sensors(gpu_temperature_celsius=30.0, power_watts=20.0)
    context = device.attach()
    context.publish(Sensors(gpu_utilization_ratio=0.5, power_watts=100.0))
    assert device.read().sensors == Sensors(gpu_utilization_ratio=0.5, gpu_temperature_celsius=30.0, power_watts=120.0)
    context.publish(Sensors(gpu_utilization_ratio=1.5))
    assert device.read().sensors.gpu_utilization_ratio == 1.0
    context.close()


def test_unpublished_sensors_are_unknown(device: SimDevice, context: Context) -> None:
    assert device.read().sensors == Sensors()


def test_root_contains_several_devices(tmp_path: Path) -> None:
    small_device(tmp_path, "SIM-b", index=0)
    small_device(tmp_path, "SIM-a", index=1)
    assert [device.spec().uuid for device in simulated_devices(tmp_path)] == ["SIM-a", "SIM-b"]


@pytest.mark.parametrize("file", ["card.json", "processes/1-x", "used"])
def test_damaged_device_raises_damaged(device: SimDevice, file: str) -> None:
    (device.directory / file).unlink(missing_ok=True)
    (device.directory / file).mkdir()
    with pytest.raises(DamagedDeviceError, match="SIM-test"):
        device.read()
