"""Before an out-of-memory error: a program that has used its out-of-memory pool, and a device that fills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpumond.facts.units import MIB
from gpumond.sim.device import DeviceSpec, create
from tests.agent.driver import build
from tests.helpers.agent_daemon import FAKES, environment, finished, run_in_program
from tests.helpers.running import RunningDaemon, until
from tests.oom.programs import card, program

pytestmark = pytest.mark.slow
UUID = "GPU-abababab-abab-abab-abab-ababababab00"
TRAIN = """
import ctypes, sys, torch, gpumond.agent
from contextlib import nullcontext
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import SimDevice
from torch.world import ACTIVE, FREE, WORLD, Segment
class MemPool:
    def __init__(self, use_on_oom):
        WORLD.segments.append(Segment([(4 << 20, FREE)], pool=(0, 1)))
    def snapshot(self):
        return [each for each in WORLD.snapshot() if each["segment_pool_id"] == (0, 1)]
libcuda = ctypes.CDLL("libcuda.so.1")
torch.cuda.current_device, torch.cuda.MemPool = lambda: 0, MemPool
torch.cuda.use_mem_pool, torch.empty, torch.uint8 = lambda pool, device: nullcontext(), lambda *a, **k: None, None
kept = CachingAllocator(SimDevice(sys.argv[1])).malloc(50 << 20)
WORLD.reset(segments=[Segment([(10 << 20, ACTIVE)])])
gpumond.agent.start(workload="train")
print(gpumond.agent.oom_pool(4 << 20), flush=True)
for line in sys.stdin:
    WORLD.segments[1].blocks = [(4 << 20, ACTIVE)]
"""


@pytest.mark.needs("cc")
def test_use_of_an_oom_pool_is_an_alert_while_the_program_runs(tmp_path: Path):
    devices, script = tmp_path / "cards", tmp_path / "train.py"
    script.write_text(TRAIN)
    devices.mkdir()
    create(devices / "card", DeviceSpec(UUID, 0, "sim", 1024 * MIB, context_bytes=16 * MIB))
    environ = {"GPUMOND_SIM_DIR": os.fspath(devices)}
    with RunningDaemon(tmp_path / "daemon", "--source", "sim", "--interval", "0.2s", environ=environ) as daemon:
        own = environment(daemon.socket, FAKES, LD_LIBRARY_PATH=str(build(tmp_path)), FAKE_CUDA="c")
        command = [sys.executable, str(script), str(devices / "card")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=own, text=True, **pipes) as train:
            assert train.stdin is not None
            assert train.stdout is not None
            assert train.stdout.readline() == "\n"
            until(lambda: [each["pid"] for each in daemon.get("agents")] == [train.pid])
            train.stdin.write("use\n")
            train.stdin.flush()
            alert = until(lambda: [each for each in daemon.get("alerts") if each["rule"] == "out-of-memory"])[0]
            (case,) = daemon.get("oom")
            assert train.poll() is None
            served = f"the out-of-memory pool served a request: train (pid {train.pid}) requested 4.0 MiB at {script}:"
            assert case["summary"].startswith(served)
            assert dict(alert["annotations"])["case"] == case["id"]
            used = f"train (pid {train.pid}) on GPU 0 has used its out-of-memory pool at {script}:"
            assert dict(alert["annotations"])["summary"].startswith(used)
            train.kill()


RULE = {
    "name": "fills-within-a-minute",
    "scope": "device",
    "value": "time_to_full_30s_seconds",
    "below": 60,
    "action": {"flush": {"min_reclaimable": "100MiB"}, "cooldown": "1m"},
}


def test_rule_flushes_a_neighbor_before_a_device_is_full(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"rules": [RULE]}))
    (tmp_path / "cards").mkdir()
    environ = {"GPUMOND_SIM_DIR": os.fspath(tmp_path / "cards")}
    options = ("--source", "sim", "--interval", "0.2s", "--config", str(config))
    with RunningDaemon(tmp_path / "daemon", *options, environ=environ) as daemon:
        device = card(daemon)
        with program(daemon, device, "notebook") as neighbor, program(daemon, device, "train") as train:
            run_in_program(neighbor, "allocator.free(allocator.malloc(500 * MIB))")
            run_in_program(train, "import time")
            filling = "for _ in range(100): allocator.malloc(5 * MIB); time.sleep(0.2)"  # 25 MiB a second
            run_in_program(train, filling)
            assert train.poll() is None, "it would have failed after 370 MiB"
            receipts = daemon.get("receipts")
            assert [(each["pid"], each["released_bytes"], each["requested_by"]) for each in receipts] == [
                (neighbor.pid, 500 * MIB, "rule:fills-within-a-minute")
            ]
            assert daemon.get("oom") == []
            finished(train)
            finished(neighbor)
