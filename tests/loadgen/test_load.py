"""`gpumond load` on simulated cards: what others see of it, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpumond.loadgen import SCENARIOS
from gpumond.sim.device import MIB, SimDevice, Spec, create
from tests.running import until
from tests.sim.holding import holder

SIZE = 8192 * MIB
CONTEXT = 64 * MIB


@pytest.fixture
def card(tmp_path: Path) -> SimDevice:
    return create(tmp_path / "cards" / "card0", Spec("SIM-load", 0, "Simulated", SIZE, context_bytes=CONTEXT))


@contextmanager
def running(card: SimDevice | None, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gpumond", "load", *arguments]
    if card is not None:
        command += ["--card", str(card.directory)]
    env = {**os.environ, "GPUMOND_SOCKET": "/nonexistent/agent.sock", **environ}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def load(card: SimDevice | None, *arguments: str, **environ: str) -> tuple[int, str, str]:
    with running(card, *arguments, **environ) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


def account(card: SimDevice | None, *arguments: str, **environ: str) -> dict[str, Any]:
    status, out, err = load(card, *arguments, "--json", **environ)
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_the_list_has_every_scenario_with_its_shape():
    status, out, _ = load(None, "--list")
    assert status == 0
    for name, scenario in SCENARIOS.items():
        assert f"{name} ({scenario.alias})" in out if scenario.alias else name in out
        assert all(line.strip() in out for line in scenario.shape)
        assert all(f"--{option.name} " in out for option in scenario.options)
    assert {entry["name"] for entry in json.loads(load(None, "--list", "--json")[1])} == set(SCENARIOS)


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"orphan", "crash"}))
def test_every_scenario_can_be_carried_out_and_leaves_nothing(card: SimDevice, name: str):
    done = account(card, name, "--max", "2GiB", "--duration", "1s", "--speed", "3000", "--no-agent")
    assert done["outcome"] == "done", done
    assert done["takes"] > 0
    assert CONTEXT < done["peak_held_bytes"] <= 2048 * MIB
    assert card.read().used_bytes == 0
    assert card.read().processes == ()


def test_without_a_card_it_has_its_own_as_large_as_the_plan_says():
    done = account(None, "p2", "--rate", "2GiB", "--speed", "6000", "--duration", "3s")
    assert done["scale"] == 1.0
    assert done["outcome"] == "full"
    assert done["peak_live_bytes"] > 70 * 1024 * MIB
    assert done["truth"]["slope_bytes_per_second"] == pytest.approx(2048 * MIB / 60 * 6000)
    assert done["ended_at"] == pytest.approx(done["truth"]["oom_at"], abs=0.5)


def test_the_card_of_a_running_demo_is_found(card: SimDevice, tmp_path: Path):
    done = account(
        None, "steady", "--duration", "1s", "--speed", "1000", "--fill", "50%", GPUMOND_SIM_DIR=str(tmp_path / "cards")
    )
    assert done["device_uuid"] == "SIM-load"
    assert done["peak_held_bytes"] <= SIZE / 2
    status, _, err = load(None, "steady", "--device", "4", GPUMOND_SIM_DIR=str(tmp_path / "cards"))
    assert status == 2
    assert "has 1 devices; pass a lower index" in err


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_half_way_frees_everything(card: SimDevice, by: signal.Signals):
    with running(card, "leak-linear", "--speed", "100", "--json") as process:
        until(lambda: (card.read().used_bytes or 0) > 200 * MIB)
        process.send_signal(by)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert card.read().used_bytes == 0
    done = json.loads(out)
    assert done["outcome"] == "stopped"
    assert done["truth"] == {
        "kind": "",
        "form": "",
        "injected_at": None,
        "ends_at": None,
        "slope_bytes_per_second": None,
        "oom_at": None,
    }


def test_injection_before_the_end_is_the_truth(card: SimDevice):
    done = account(card, "leak-linear", "--duration", "2s", "--speed", "3000", "--rate", "100MiB")
    truth = done["truth"]
    assert (truth["kind"], truth["form"]) == ("leak", "linear")
    assert done["started_at"] < truth["injected_at"] < truth["ends_at"] <= done["ended_at"] < truth["oom_at"]


def test_a_card_that_lacks_the_room_is_refused(card: SimDevice):
    with holder(card, SIZE - 1024 * MIB):
        status, out, err = load(card, "preallocated")
        assert (status, out) == (1, "")
        assert "of 8.0 GiB free: request less with --fill 40% or --max 8GiB" in err
        assert len(card.read().processes or ()) == 1
        assert account(card, "steady", "--max", "500MiB", "--duration", "200ms", "--speed", "1000")["takes"]


def test_a_crash_loop_is_a_new_process_each_time(card: SimDevice):
    pids = set()
    with running(card, "crash", "--times", "3", "--speed", "900", "--duration", "4s", "--json") as process:
        while process.poll() is None:
            pids |= {usage.pid for usage in card.read().processes or ()}
        out = process.communicate()[0]
    done = json.loads(out)
    assert len(pids - {process.pid}) == 3
    assert done["lives"] == 3
    assert done["truth"]["kind"] == "crash-loop"
    assert done["peak_live_bytes"] > 0.75 * SIZE
    assert card.read().used_bytes == 0


def test_an_orphan_is_used_memory_without_a_process_and_goes_with_the_load(card: SimDevice):
    def orphaned() -> bool:
        reading = card.read()
        return not reading.processes and (reading.used_bytes or 0) > 4 * CONTEXT

    with running(card, "orphan", "--speed", "1500", "--duration", "7s", "--json") as process:
        until(orphaned)
        until(lambda: process.poll() is not None, 30)
        done = json.loads(process.communicate()[0])
    assert done["truth"]["kind"] == "orphan"
    assert card.read().used_bytes == 0


def test_a_load_that_is_killed_takes_its_child_along(card: SimDevice):
    with running(card, "crash", "--speed", "10") as process:
        until(lambda: card.read().processes)
        process.kill()
        process.wait()
        until(lambda: not card.read().processes)


def test_a_flush_storm_is_flushed_through_the_agent(card: SimDevice):
    done = account(card, "flush-storm", "--duration", "2s", "--speed", "20", "--max", "4GiB")
    assert done["flushes"] > 5
    assert done["released_bytes"] > 1024 * MIB
    assert account(card, "flush-storm", "--duration", "2s", "--speed", "20", "--no-agent")["released_bytes"] > 0


def test_a_plan_that_is_too_fast_for_the_machine_ends_in_time_and_says_so(card: SimDevice):
    done = account(card, "flush-storm", "--duration", "1s", "--speed", "20000", "--no-agent")
    assert "too fast for this device: " in done["detail"]
    assert done["ended_at"] - done["started_at"] < 15
    assert card.read().used_bytes == 0


def test_the_summary_says_what_was_done_and_what_is_right(card: SimDevice):
    status, out, _ = load(card, "warm-up", "--duration", "1s", "--speed", "1000")
    assert status == 0
    assert out.startswith("warm-up on sim: done after 1.")
    assert "all memory is freed" in out
    assert "expected verdict: none" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no scenario given; `gpumond load --list`"),
        (("leek",), "no scenario is named 'leek'"),
        (("p2", "--rate", "fast"), "option --rate 'fast': expected a number"),
        (("p2", "--share", "50%"), "option --share: leak-linear has no such option; it has --rate"),
        (("p2", "--speed", "0"), "option --speed 0: expected a number above 0, such as 60"),
        (("p2", "--fill", "150%"), "option --fill '150%': expected a share above 0 and up to 100%, such as 50%"),
        (("p2", "--max", "0"), "option --max '0': expected a size above 0, such as 8GiB"),
        (("p2", "--duration", "later"), "option --duration 'later': expected a duration such as 30s"),
        (("p2", "--duration", "90d"), "expected a duration of at least 1 and at most 172800"),
        (("p2", "--workload", "my job"), "option --workload: workload: expected 1 to 64 characters"),
        (("p2", "--streams", "0"), "option --streams 0: expected 1 to 64"),
        (("stress", "--fill", "200%"), "option --fill '200%': expected a share of at least 0.01 and at most 0.99"),
    ],
)
def test_wrong_use_is_one_line_with_the_mend(arguments: tuple[str, ...], said: str):
    status, out, err = load(None, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("gpumond: ")]) == 1
    assert "Traceback" not in err


def test_a_directory_that_is_no_card_is_refused(tmp_path: Path):
    status, _, err = load(None, "steady", "--card", str(tmp_path))
    assert status == 1
    assert "no simulated device" in err
