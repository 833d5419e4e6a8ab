from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpumond.model.sensors import Sensors
from gpumond.sim.device import (
    MIB,
    Context,
    Damaged,
    OutOfMemory,
    SimDevice,
    Spec,
    create,
    simulated_devices,
    start_ticks,
)
from tests.sim.holding import holder, run, small_card


@pytest.fixture
def card(tmp_path: Path) -> SimDevice:
    return small_card(tmp_path)


@pytest.fixture
def context(card: SimDevice) -> Iterator[Context]:
    context = card.attach()
    yield context
    context.close()


def test_attaching_costs_the_context(card: SimDevice, context: Context) -> None:
    context.allocate(100 * MIB)
    reading = card.read()
    assert reading.processes is not None
    assert [(p.pid, p.start_ticks, p.used_bytes) for p in reading.processes] == [
        (os.getpid(), start_ticks(os.getpid()), 116 * MIB)
    ]
    assert (reading.used_bytes, reading.reserved_bytes, reading.free_bytes) == (116 * MIB, 24 * MIB, 884 * MIB)


def test_a_process_has_one_context_per_device(card: SimDevice, context: Context) -> None:
    assert SimDevice(card.directory).attach() is context


def test_closing_gives_everything_back(card: SimDevice) -> None:
    context = card.attach()
    context.allocate(MIB)
    context.close()
    reading = card.read()
    assert (reading.used_bytes, reading.processes) == (0, ())
    with pytest.raises(ValueError, match="closed"):
        context.allocate(MIB)


def test_out_of_memory_changes_nothing(card: SimDevice, context: Context) -> None:
    context.allocate(900 * MIB)
    with pytest.raises(OutOfMemory, match=r"84\.00 MiB free"):
        context.allocate(84 * MIB + 1)
    assert card.read().used_bytes == 916 * MIB
    context.allocate(84 * MIB)
    assert card.read().free_bytes == 0


def test_a_context_that_does_not_fit_is_out_of_memory(card: SimDevice) -> None:
    with holder(card, 980 * MIB):
        with pytest.raises(OutOfMemory):
            card.attach()
        processes = card.read().processes
    assert processes is not None
    assert os.getpid() not in [process.pid for process in processes]


def test_no_more_is_freed_than_was_allocated(context: Context) -> None:
    context.allocate(MIB)
    with pytest.raises(ValueError, match="cannot free"):
        context.free(2 * MIB)


def test_a_killed_process_holds_nothing_even_as_a_zombie(card: SimDevice) -> None:
    with holder(card, 500 * MIB) as process:
        assert card.read().used_bytes == 516 * MIB
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert card.read().used_bytes == 0
    assert list((card.directory / "processes").iterdir()) == []


def test_memory_of_a_killed_process_can_be_allocated_at_once(card: SimDevice, context: Context) -> None:
    with holder(card, 900 * MIB) as process:
        with pytest.raises(OutOfMemory):
            context.allocate(500 * MIB)
        process.kill()
        process.wait()
        context.allocate(500 * MIB)


def test_a_reused_pid_is_another_process(card: SimDevice) -> None:
    (card.directory / "processes" / f"{os.getpid()}-1").write_text("[1048576, null, null, null]")
    assert card.read().processes == ()


def test_a_name_with_brackets_and_spaces_is_still_alive(card: SimDevice, tmp_path: Path) -> None:
    python = tmp_path / "x) Z 1 (y"
    python.symlink_to(sys.executable)
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_ticks(process.pid) is not None
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


def test_contending_processes_hold_exactly_the_capacity(card: SimDevice) -> None:
    with ExitStack() as running:
        contenders = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CONTEND, str(card.directory)],
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
        reading = card.read()
        for go, _ in pipes:
            go.close()
    assert (reading.used_bytes, reading.free_bytes) == (sum(held), 0)


FORK = """
import os, sys
from gpumond.sim.device import MIB, SimDevice
card = SimDevice(sys.argv[1])
inherited = card.attach()
inherited.allocate(10 * MIB)
if os.fork() == 0:
    try:
        inherited.allocate(MIB)
    except ValueError:
        card.attach().allocate(5 * MIB)
        print(sorted(p.used_bytes // MIB for p in card.read().processes), flush=True)
    os._exit(0)
os.wait()
print([p.used_bytes // MIB for p in card.read().processes])
"""


def test_a_forked_child_attaches_as_itself(card: SimDevice) -> None:
    assert run(FORK, str(card.directory)).split("\n")[:2] == ["[21, 26]", "[26]"]


def test_published_numbers_are_summed(tmp_path: Path) -> None:
    spec = Spec("SIM-warm", 0, "Simulated", 1024 * MIB, context_bytes=0, idle_celsius=30.0, idle_watts=20.0)
    card = create(tmp_path / "warm", spec)
    assert card.read().sensors == Sensors(gpu_temperature_celsius=30.0, power_watts=20.0)
    context = card.attach()
    context.publish(Sensors(gpu_utilization_ratio=0.5, power_watts=100.0))
    assert card.read().sensors == Sensors(gpu_utilization_ratio=0.5, gpu_temperature_celsius=30.0, power_watts=120.0)
    context.publish(Sensors(gpu_utilization_ratio=1.5))
    assert card.read().sensors.gpu_utilization_ratio == 1.0
    context.close()


def test_unpublished_sensors_are_unknown(card: SimDevice, context: Context) -> None:
    assert card.read().sensors == Sensors()


def test_a_root_contains_several_devices(tmp_path: Path) -> None:
    small_card(tmp_path, "SIM-b", index=0)
    small_card(tmp_path, "SIM-a", index=1)
    assert [card.spec().uuid for card in simulated_devices(tmp_path)] == ["SIM-a", "SIM-b"]


@pytest.mark.parametrize("file", ["card.json", "processes/1-x", "used"])
def test_a_damaged_device_raises_damaged(card: SimDevice, file: str) -> None:
    (card.directory / file).unlink(missing_ok=True)
    (card.directory / file).mkdir()
    with pytest.raises(Damaged, match="SIM-test"):
        card.read()
