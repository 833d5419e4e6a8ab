"""`gpumond load` on stand-ins of CuPy and PyTorch, which count what is really taken from their card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

STANDINS = Path(__file__).parent / "standins"
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
both = pytest.mark.parametrize("engine", ["cupy", "torch"])


class Card:
    """The stand-in's card: what a program that has ended took from it."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.log = directory / "card.json"
        path = os.pathsep.join(map(str, (STANDINS, ROOT)))
        own = {"PYTHONPATH": path, "STANDIN_LOG": str(self.log), "GPUMOND_SOCKET": str(directory / "nobody.sock")}
        self.environ = os.environ | own | environ

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpumond", "load", *arguments]
        return subprocess.Popen(command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def load(self, *arguments: str) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=60)
            return process.returncode, out, err

    def account(self, *arguments: str) -> dict[str, Any]:
        status, out, err = self.load(*arguments, "--json")
        assert status == 0, err
        account: dict[str, Any] = json.loads(out)
        return account

    def facts(self) -> dict[str, int]:
        facts: dict[str, int] = json.loads(self.log.read_text())
        return facts


@both
@pytest.mark.parametrize("scenario", ["leak-linear", "leak-compile-cache", "fragmentation", "flush-storm", "autotune"])
def test_memory_use_is_within_the_limit_and_all_of_it_is_freed(tmp_path: Path, engine: str, scenario: str):
    card = Card(tmp_path)
    account = card.account(scenario, "--engine", engine, "--max", "1GiB", "--duration", "1s", "--speed", "2000")
    facts = card.facts()
    assert account["outcome"] == "done"
    assert 200 * MIB < facts["peak"] <= 1024 * MIB
    assert facts["used"] == 0
    assert account["peak_held_bytes"] <= facts["peak"]
    assert account["scale"] == pytest.approx(1 / 80, rel=0.05)


def test_raw_goes_past_the_pool(tmp_path: Path):
    card = Card(tmp_path)
    options = ("--engine", "cupy", "--raw", "--streams", "3", "--fill", "25%", "--duration", "1s", "--speed", "2000")
    account = card.account("leak-linear", *options)
    assert account["peak_held_bytes"] == account["peak_live_bytes"]
    facts = card.facts()
    assert facts["allocations"] == account["takes"]
    assert facts["peak"] <= 2048 * MIB
    assert facts["used"] == 0
    assert facts["worked"] % 3 == 0
    assert facts["worked"] > 0


@both
def test_a_device_is_kept_busy(tmp_path: Path, engine: str):
    card = Card(tmp_path)
    card.account("steady", "--engine", engine, "--duration", "1s", "--speed", "200", "--max", "500MiB")
    assert card.facts()["worked"] > 0


@both
def test_a_full_card_ends_it_in_order(tmp_path: Path, engine: str):
    card = Card(tmp_path)
    options = ("--engine", engine, "--rate", "4GiB", "--speed", "4000", "--max", "1GiB")
    account = card.account("leak-linear", *options)
    assert account["outcome"] == "full"
    assert account["detail"]
    assert account["truth"]["kind"] == "leak"
    assert abs(account["ended_at"] - account["truth"]["oom_at"]) < 1.0
    assert card.facts()["used"] == 0


@both
def test_a_card_that_lacks_the_room_is_refused_before_anything_is_taken(tmp_path: Path, engine: str):
    card = Card(tmp_path, STANDIN_OTHERS_MIB="7000")
    status, out, err = card.load("preallocated", "--engine", engine)
    assert (status, out) == (1, "")
    assert "1.2 GiB of 8.0 GiB free" in err
    assert "--fill" in err
    assert card.facts()["peak"] <= 40 * MIB


@both
def test_a_machine_without_a_device_is_refused(tmp_path: Path, engine: str):
    status, _, err = Card(tmp_path, STANDIN_SIZE_MIB="0").load("steady", "--engine", engine)
    assert status == 1
    assert "gpumond doctor" in err
    assert "Traceback" not in err


@both
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, engine: str):
    status, _, err = Card(tmp_path).load("steady", "--engine", engine, "--device", "3")
    assert status == 1
    assert "there is no device 3: use --device 0 to 0" in err


@both
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_half_way_frees_everything(tmp_path: Path, engine: str, by: signal.Signals):
    card = Card(tmp_path)
    with card.start("steady", "--engine", engine, "--max", "1GiB", "--speed", "50", "--json") as process:
        time.sleep(1.5)
        process.send_signal(by)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    account = json.loads(out)
    assert account["outcome"] == "stopped"
    assert account["truth"]["kind"] == ""
    facts = card.facts()
    assert facts["peak"] > 0
    assert facts["used"] == 0


@both
def test_stress_reads_back_what_it_wrote(tmp_path: Path, engine: str):
    options = ("stress", "--engine", engine, "--fill", "90%", "--duration", "1s", "--speed", "60")
    good = Card(tmp_path)
    account = good.account(*options)
    assert account["wrong_words"] == 0
    assert account["checked_bytes"] > 6000 * MIB
    assert 0.85 * 8192 * MIB < good.facts()["peak"] <= 0.91 * 8192 * MIB
    status, out, _ = Card(tmp_path, STANDIN_WRONG_WORDS="1").load(*options)
    assert status == 1
    assert "0 incorrect words" not in out
    assert "incorrect words" in out


@both
def test_orphan_is_refused_on_a_real_driver(tmp_path: Path, engine: str):
    card = Card(tmp_path)
    status, _, err = card.load("orphan", "--engine", engine)
    assert status == 1
    assert "a driver frees the memory of a killed program" in err
    assert err.count("gpumond: ") == 1


@both
def test_a_crash_kills_a_child_and_starts_another(tmp_path: Path, engine: str):
    options = ("--times", "3", "--duration", "4s", "--speed", "1200", "--max", "1GiB")
    account = Card(tmp_path).account("crash", "--engine", engine, *options)
    assert (account["lives"], account["outcome"]) == (3, "crash")
    assert account["truth"]["kind"] == "crash-loop"
    assert account["peak_live_bytes"] > 900 * MIB


@both
def test_a_library_that_is_not_there_is_said_with_the_mend(tmp_path: Path, engine: str):
    (tmp_path / f"{engine}.py").write_text(f"raise ModuleNotFoundError('No module named {engine}', name={engine!r})")
    card = Card(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    status, _, err = card.load("steady", "--engine", engine)
    assert status == 2
    assert "pip install" in err
    assert "Traceback" not in err
