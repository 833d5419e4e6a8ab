"""Load generator on a real device: its memory as nvidia-smi shows it, which is all freed at its end."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CONTEXT = 2048 * MIB
"""Upper bound of a CUDA context, its libraries and their workspaces."""


@pytest.fixture(autouse=True)
def _needs_a_device_and_cupy() -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device and nvidia-smi")
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("needs CuPy")


def used() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout) * MIB


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gpumond", "loadgen", *arguments, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_load(*arguments: str) -> tuple[dict[str, Any], int]:
    """Run the load generator and return its report and the peak of the device's used memory."""
    peak = 0
    with start(*arguments) as process:
        while process.poll() is None:
            peak = max(peak, used())
            time.sleep(0.05)
        out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out), peak


@pytest.mark.parametrize("scenario", ["leak-linear", "leak-at-eval", "fragmentation", "periodic-eval", "flush-storm"])
def test_memory_use_is_within_the_limit_and_all_of_it_is_freed(scenario: str) -> None:
    before = used()
    options = ("--backend", "cupy", "--max", "8GiB", "--duration", "5s", "--speed", "2000")
    account, peak = run_load(scenario, *options)
    assert account["takes"] > 0
    assert account["peak_held_bytes"] <= 8192 * MIB
    assert peak - before <= 8192 * MIB + CONTEXT
    assert peak - before >= 0.5 * account["peak_held_bytes"]
    assert abs(used() - before) <= 64 * MIB


def test_signal_during_the_run_frees_everything() -> None:
    before = used()
    with start("steady", "--backend", "cupy", "--max", "8GiB", "--speed", "50") as process:
        time.sleep(6)
        assert used() - before > 1024 * MIB
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["outcome"] == "stopped"
    assert abs(used() - before) <= 64 * MIB


def test_stress_verifies_what_it_wrote() -> None:
    account, _ = run_load("stress", "--backend", "cupy", "--fill", "80%", "--duration", "10s", "--speed", "20")
    assert account["wrong_words"] == 0
    assert account["checked_bytes"] > 0


def test_crash_leaves_no_memory_in_use() -> None:
    before = used()
    options = ("--times", "3", "--max", "8GiB", "--duration", "16s", "--speed", "300")
    account, _ = run_load("crash", "--backend", "cupy", *options)
    assert account["lives"] == 3
    time.sleep(2)
    assert abs(used() - before) <= 64 * MIB
