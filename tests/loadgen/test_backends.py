"""`gpumond loadgen` on a fake of CuPy, which counts the allocations on its device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import until

FAKES = Path(__file__).parent / "fakes"
ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class FakeGpu:
    """Device of the fakes: the counts that an ended program has written."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.log = directory / "card.json"
        path = os.pathsep.join(map(str, (FAKES, ROOT)))
        own = {"PYTHONPATH": path, "FAKE_LOG": str(self.log), "GPUMOND_SOCKET": str(directory / "none.sock")}
        self.environ = os.environ | own | environ

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpumond", "loadgen", *arguments]
        return subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def load(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=60)
            return process.returncode, out, err

    def summary_of(self, *arguments: str) -> dict[str, Any]:
        status, out, err = self.load(*arguments, "--json")
        assert status == 0, err
        summary: dict[str, Any] = json.loads(out)
        return summary

    def facts(self) -> dict[str, int]:
        facts: dict[str, int] = json.loads(self.log.read_text())
        return facts


@pytest.mark.parametrize("scenario", ["leak-linear", "leak-compile-cache", "fragmentation", "flush-storm", "autotune"])
def test_memory_use_is_within_the_limit_and_all_of_it_is_freed(tmp_path: Path, scenario: str):
    device = FakeGpu(tmp_path)
    summary = device.summary_of(scenario, "--backend", "cupy", "--max", "1GiB", "--duration", "1s", "--speed", "2000")
    facts = device.facts()
    assert summary["outcome"] == "done"
    assert 200 * MIB < facts["peak"] <= 1024 * MIB
    assert facts["used"] == 0
    assert summary["peak_held_bytes"] <= facts["peak"]
    assert summary["scale"] == pytest.approx(1 / 80, rel=0.05)


def test_busy_scenario_runs_kernels(tmp_path: Path):
    device = FakeGpu(tmp_path)
    device.summary_of("steady", "--backend", "cupy", "--duration", "1s", "--speed", "200", "--max", "500MiB")
    assert device.facts()["worked"] > 0


def test_full_device_ends_the_load_in_order(tmp_path: Path):
    device = FakeGpu(tmp_path)
    options = ("--backend", "cupy", "--rate", "4GiB", "--speed", "4000", "--max", "1GiB")
    summary = device.summary_of("leak-linear", *options)
    assert summary["outcome"] == "full"
    assert summary["detail"]
    assert summary["expected_verdict"]["kind"] == "leak"
    assert abs(summary["ended_at"] - summary["expected_verdict"]["oom_at"]) < 1.0
    assert device.facts()["used"] == 0


def test_device_with_too_little_free_memory_is_refused_before_allocation(tmp_path: Path):
    device = FakeGpu(tmp_path, FAKE_OTHERS_MIB="7000")
    status, out, err = device.load("preallocated", "--backend", "cupy")
    assert (status, out) == (1, "")
    assert "1.2 GiB of 8.0 GiB free" in err
    assert "--fill" in err
    assert device.facts()["peak"] <= 40 * MIB


def test_machine_without_a_device_is_refused(tmp_path: Path):
    status, _, err = FakeGpu(tmp_path, FAKE_SIZE_MIB="0").load("steady", "--backend", "cupy")
    assert status == 1
    assert "gpumond doctor" in err
    assert "Traceback" not in err


def test_unknown_device_is_refused(tmp_path: Path):
    status, _, err = FakeGpu(tmp_path).load("steady", "--backend", "cupy", "--device", "3")
    assert status == 1
    assert "there is no device 3: CUDA finds 1 GPU, and the first one is 0" in err


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_run_frees_everything(tmp_path: Path, by: signal.Signals):
    device = FakeGpu(tmp_path)
    with device.start("steady", "--backend", "cupy", "--max", "1GiB", "--speed", "50", "--json") as process:
        until(device.log.exists)
        process.send_signal(by)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["outcome"] == "stopped"
    assert summary["expected_verdict"]["kind"] == ""
    facts = device.facts()
    assert facts["peak"] > 0
    assert facts["used"] == 0


def test_stress_verifies_what_it_wrote(tmp_path: Path):
    options = ("stress", "--backend", "cupy", "--fill", "90%", "--duration", "1s", "--speed", "60")
    good = FakeGpu(tmp_path)
    summary = good.summary_of(*options)
    assert summary["wrong_words"] == 0
    assert summary["checked_bytes"] > 6000 * MIB
    assert 0.85 * 8192 * MIB < good.facts()["peak"] <= 0.91 * 8192 * MIB
    status, out, _ = FakeGpu(tmp_path, FAKE_WRONG_WORDS="1").load(*options)
    assert status == 1
    assert "0 incorrect words" not in out
    assert "incorrect words" in out


def test_orphan_is_refused_on_a_real_driver(tmp_path: Path):
    device = FakeGpu(tmp_path)
    status, _, err = device.load("orphan", "--backend", "cupy")
    assert status == 1
    assert "a driver frees the memory of a killed program" in err
    assert err.count("gpumond: ") == 1


def test_crash_scenario_kills_a_child_and_starts_another(tmp_path: Path):
    options = ("--times", "3", "--duration", "4s", "--speed", "1200", "--max", "1GiB")
    summary = FakeGpu(tmp_path).summary_of("crash", "--backend", "cupy", *options)
    assert (summary["lives"], summary["outcome"]) == (3, "crash")
    assert summary["expected_verdict"]["kind"] == "crash-loop"
    assert summary["peak_live_bytes"] > 900 * MIB


def test_missing_library_is_named_with_the_remedy(tmp_path: Path):
    (tmp_path / "cupy.py").write_text("raise ModuleNotFoundError('No module named cupy', name='cupy')")
    device = FakeGpu(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    status, _, err = device.load("steady", "--backend", "cupy")
    assert status == 2
    assert "pip install" in err
    assert "Traceback" not in err
