from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from gpumond.commands.demo import NEEDED_GIB
from gpumond.facts.pools import PoolUsage
from gpumond.facts.units import GIB
from gpumond.sim.allocator import ProgramMemory
from gpumond.sim.device import MIB, DeviceSpec, OutOfMemory, SimDevice, create
from gpumond.sim.programs import PROGRAMS, QUIET_SECONDS, leak, run
from tests.helpers.holding import holder, small_device

SIZE = 24 * 1024 * MIB


def minutes(name: str, device: SimDevice, number: int, seed: int = 1) -> list[PoolUsage]:
    """PoolUsage of a program's allocator after each second of its virtual time."""
    memory, seconds = ProgramMemory(device), 0.0
    statistics: list[PoolUsage] = []
    for pause in PROGRAMS[name](memory, Random(seed)):
        seconds += pause
        while len(statistics) < seconds:
            statistics.append(memory.allocator.usage())
        if seconds > 60 * number:
            break
    memory.allocator.close()
    return statistics


@pytest.fixture
def device(tmp_path: Path) -> SimDevice:
    return create(tmp_path / "card", DeviceSpec("SIM-demo", 0, "Simulated", SIZE))


def test_training_leaves_a_large_cache(device: SimDevice) -> None:
    statistics = minutes("training", device, 3)
    assert max(now.reclaimable.likely for now in statistics) > 0.1 * SIZE
    assert max(now.stranded_bytes for now in statistics) == 0
    steps = [now.live_bytes for now in statistics[60:80]]
    assert max(steps) - min(steps) > 0.04 * SIZE, "activations rise and fall"


def test_serving_grows_and_releases(device: SimDevice) -> None:
    live = [now.live_bytes for now in minutes("serving", device, 10)]
    assert min(live[120:]) < 0.1 * SIZE < max(live[120:])


def test_leak_keeps_more_every_minute_and_ends(device: SimDevice) -> None:
    live = [now.live_bytes for now in minutes("leak", device, 10)]
    assert 4 * 60 < len(live) < 6 * 60
    per_minute = [min(live[start : start + 60]) for start in (60, 120, 180)]
    assert max(live[1:40]) - min(live[1:40]) < 256 * MIB, "it trains before it leaks"
    grown = [later - earlier for earlier, later in pairwise(per_minute)]
    assert all(600 * MIB < more < 1024 * MIB for more in grown)


def test_fragmentation_strands_more_bytes_at_constant_live_bytes(device: SimDevice) -> None:
    quiet = int(QUIET_SECONDS)
    both = minutes("fragmentation", device, 3)
    statistics, then = both[: 100 + quiet], both[100 + quiet : 120 + quiet]
    assert max(now.stranded_bytes for now in statistics[:quiet]) == 0
    live = [now.live_bytes for now in statistics[10:]]
    assert max(live) - min(live) < 0.008 * SIZE
    stranded = [now.stranded_bytes for now in statistics[10 + quiet :: 30]]
    assert stranded == sorted(stranded)
    assert stranded[-1] > live[-1]
    assert max(now.reclaimable.likely for now in statistics) == 0
    assert max(now.reclaimable.likely for now in then) > max(stranded)  # in the end it needs none of it


@pytest.mark.parametrize("seed", [1, 2])
def test_four_programs_fit_on_one_device(device: SimDevice, seed: int) -> None:
    first = [name for name in PROGRAMS if name not in ("idle", "finetune", "pretrain")]
    together = list(zip(*(minutes(name, device, 8, seed) for name in first), strict=False))
    used = [sum(now.held_bytes + 256 * MIB for now in moment) for moment in together[60:]]
    assert max(used) < 0.8 * SIZE
    assert 0.55 * SIZE < sum(used) / len(used) < 0.75 * SIZE


def test_largest_batch_does_not_fit_beside_an_idle_program(device: SimDevice) -> None:
    beside = min(now.held_bytes for now in minutes("idle", device, 2)[60:])
    memory, seconds = ProgramMemory(device), [0.0]
    memory.allocate(beside / SIZE)

    def pause(passed: float) -> bool:
        seconds.append(passed)
        return passed != 5.0  # the pause after an error

    run(PROGRAMS["finetune"], memory, Random(1), pause)
    assert memory.allocator.usage().ooms == 1
    assert 60 < sum(seconds) < 180
    memory.allocator.close()


def test_pretrain_fits_only_without_the_idle_program_and_ends(device: SimDevice) -> None:
    beside = min(now.held_bytes for now in minutes("idle", device, 2)[60:])
    need, overhead = NEEDED_GIB * GIB, 256 * MIB
    assert need + beside > SIZE
    memory, seconds = ProgramMemory(device), [0.0]

    def pause(passed: float) -> bool:
        seconds[0] += passed
        assert need <= memory.allocator.usage().held_bytes + overhead <= need + GIB  # it uses what it is granted
        return True

    run(PROGRAMS["pretrain"], memory, Random(1), pause)
    assert 60 < seconds[0] < 120  # `gpumond resume embeddings --wait 2m` succeeds
    memory.allocator.close()


def test_seed_determines_the_run(device: SimDevice) -> None:
    assert minutes("serving", device, 2, seed=7) == minutes("serving", device, 2, seed=7)
    assert minutes("serving", device, 2, seed=7) != minutes("serving", device, 2, seed=8)


def test_program_restarts_when_the_device_is_full(tmp_path: Path) -> None:
    device = small_device(tmp_path, size_mib=160)
    memory = ProgramMemory(device)
    cleared: list[float] = []

    def pause(seconds: float) -> bool:
        if seconds == 5.0:
            cleared.append(seconds)
            assert memory.allocator.usage().held_bytes == 0
        return len(cleared) < 3

    run(leak, memory, Random(1), pause)
    assert memory.allocator.usage().ooms == 3
    with pytest.raises(OutOfMemory):
        memory.allocate(1.0)
    memory.allocator.close()


def test_program_waits_until_its_context_fits(tmp_path: Path) -> None:
    device = small_device(tmp_path)
    memory = ProgramMemory(device)
    pauses: list[float] = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 2:
            other.kill()
            other.wait()
        return len(pauses) < 3

    with holder(device, 980 * MIB) as other:
        run(leak, memory, Random(1), pause)
    assert pauses == [5.0, 5.0, 0.5]
    memory.allocator.close()


@contextmanager
def program(device: SimDevice, name: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "gpumond.sim.programs", name, "--device", str(device.directory), *options]
    environ = os.environ | {"GPUMOND_SOCKET": str(device.directory / "none.sock")}
    with subprocess.Popen(command, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for 30 s"
        time.sleep(0.01)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_ends_cleanly_on_a_signal(device: SimDevice, name: str) -> None:
    with program(device, name) as process:
        wait_for(lambda: device.read().processes)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert device.read().used_bytes == 0


def test_program_ends_after_its_duration(device: SimDevice) -> None:
    with program(device, "serving", "--duration", "0.2", "--speed", "20") as process:
        assert process.wait(30) == 0


def test_program_ends_with_its_parent(device: SimDevice) -> None:
    with program(device, "serving", "--parent", "1") as process:
        assert process.wait(30) == 0
