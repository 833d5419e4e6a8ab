"""`gpumond loadgen` on simulated devices: its effects as others see them, and that none of them remains."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.units import GIB
from gpumond.features.loadgen.plan import SCENARIOS
from gpumond.features.loadgen.runner import regressions
from gpumond.sim.device import MIB, DeviceSpec, SimDevice, create
from tests.helpers.holding import holder
from tests.helpers.running import gpumond_here, until
from tests.loadgen.loads import CONTEXT, SIZE, load, running


def summary_of(device: SimDevice | None, *arguments: str, **environ: str) -> dict[str, Any]:
    status, out, err = load(device, *arguments, "--json", **environ)
    assert status == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_list_has_each_scenario_with_its_shape():
    status, out, _ = load(None, "--list")
    assert status == 0
    for name, scenario in SCENARIOS.items():
        assert f"{name} ({scenario.alias})" in out if scenario.alias else name in out
        assert all(line.strip() in out for line in scenario.shape)
        assert all(f"--{option.name} " in out for option in scenario.options)
    assert {entry["name"] for entry in json.loads(load(None, "--list", "--json")[1])} == set(SCENARIOS)


@pytest.mark.parametrize("name", sorted(set(SCENARIOS) - {"orphan", "crash"}))
def test_scenario_runs_and_leaves_no_memory(device: SimDevice, name: str):
    done = summary_of(device, name, "--max", "2GiB", "--duration", "1s", "--speed", "3000", "--no-agent")
    assert done["outcome"] == "done", done
    assert done["takes"] > 0
    assert CONTEXT < done["peak_held_bytes"] <= 2048 * MIB
    assert device.read().used_bytes == 0
    assert device.read().processes == ()


def test_load_without_a_device_creates_one_of_the_planned_size():
    done = summary_of(None, "p2", "--rate", "2GiB", "--speed", "6000", "--duration", "3s")
    assert done["scale"] == 1.0
    assert done["outcome"] == "full"
    assert done["peak_live_bytes"] > 70 * 1024 * MIB
    assert done["expected_verdict"]["slope_bytes_per_second"] == pytest.approx(2048 * MIB / 60 * 6000)
    assert done["ended_at"] > done["expected_verdict"]["oom_at"] - 0.5


def test_device_of_a_running_demo_is_found(device: SimDevice, tmp_path: Path):
    done = summary_of(
        None, "steady", "--duration", "1s", "--speed", "1000", "--fill", "50%", GPUMOND_SIM_DIR=str(tmp_path / "cards")
    )
    assert done["device_uuid"] == "SIM-load"
    assert done["peak_held_bytes"] <= SIZE / 2
    for index in ("-1", "1"):
        status, _, err = load(None, "steady", "--device", index, GPUMOND_SIM_DIR=str(tmp_path / "cards"))
        assert status == 2
        assert f"--device {index}: " in err
        assert "has 1 device; the first one is 0" in err


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_run_frees_everything(device: SimDevice, by: signal.Signals):
    with running(device, "leak-linear", "--speed", "100", "--json") as process:
        until(lambda: (device.read().used_bytes or 0) > 200 * MIB)
        process.send_signal(by)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert device.read().used_bytes == 0
    done = json.loads(out)
    assert done["outcome"] == "stopped"
    assert done["expected_verdict"] == {
        "kind": "",
        "form": "",
        "injected_at": None,
        "ends_at": None,
        "slope_bytes_per_second": None,
        "oom_at": None,
    }


def test_injection_before_the_end_is_the_truth(device: SimDevice):
    done = summary_of(device, "leak-linear", "--duration", "2s", "--speed", "3000", "--rate", "100MiB")
    truth = done["expected_verdict"]
    assert (truth["kind"], truth["form"]) == ("leak", "linear")
    assert done["started_at"] < truth["injected_at"] < truth["ends_at"] <= done["ended_at"] < truth["oom_at"]


def test_device_with_too_little_free_memory_is_refused(device: SimDevice):
    with holder(device, SIZE - 1024 * MIB):
        status, out, err = load(device, "preallocated")
        assert (status, out) == (1, "")
        assert "of 8.0 GiB free: request less with --fill 40% or --max 8GiB" in err
        assert len(device.read().processes or ()) == 1
        assert summary_of(device, "steady", "--max", "500MiB", "--duration", "200ms", "--speed", "1000")["takes"]


def test_crash_loop_has_a_new_process_for_each_crash(device: SimDevice):
    pids = set()
    with running(device, "crash", "--times", "3", "--speed", "900", "--duration", "4s", "--json") as process:
        while process.poll() is None:
            pids |= {usage.pid for usage in device.read().processes or ()}
            time.sleep(0.01)
        out = process.communicate()[0]
    done = json.loads(out)
    assert len(pids - {process.pid}) == 3
    assert done["lives"] == 3
    assert done["expected_verdict"]["kind"] == "crash-loop"
    assert done["peak_live_bytes"] > 0.75 * SIZE
    assert device.read().used_bytes == 0


def test_orphan_is_used_memory_without_a_process_until_the_load_ends(device: SimDevice):
    def orphaned() -> bool:
        reading = device.read()
        return not reading.processes and (reading.used_bytes or 0) > 4 * CONTEXT

    with running(device, "orphan", "--speed", "1500", "--duration", "7s", "--json") as process:
        until(orphaned)
        until(lambda: process.poll() is not None, 30)
        done = json.loads(process.communicate()[0])
    assert done["expected_verdict"]["kind"] == "orphan"
    assert device.read().used_bytes == 0


def test_child_ends_with_a_killed_load(device: SimDevice):
    with running(device, "crash", "--speed", "10") as process:
        until(lambda: device.read().processes)
        process.kill()
        process.wait()
        until(lambda: not device.read().processes)


def test_flush_storm_is_flushed_through_the_agent(device: SimDevice):
    done = summary_of(device, "flush-storm", "--duration", "2s", "--speed", "20", "--max", "4GiB")
    assert done["flushes"] > 5
    assert done["released_bytes"] > 1024 * MIB
    assert summary_of(device, "flush-storm", "--duration", "2s", "--speed", "20", "--no-agent")["released_bytes"] > 0


def test_plan_too_fast_for_the_machine_ends_in_time_with_a_note(device: SimDevice):
    done = summary_of(device, "flush-storm", "--duration", "1s", "--speed", "20000", "--no-agent")
    assert "too fast for this device: " in done["detail"]
    assert device.read().used_bytes == 0


def test_summary_has_the_actions_and_the_truth(device: SimDevice):
    status, out, _ = load(device, "warm-up", "--duration", "1s", "--speed", "1000")
    assert status == 0
    assert out.startswith("warm-up on sim: done after 1.")
    assert "all memory is freed" in out
    assert "expected verdict: none" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no scenario given; to list all scenarios: gpumond loadgen --list"),
        (("leek",), "no scenario is named 'leek'"),
        (("p2", "--rate", "fast"), "--rate 'fast': expected a size"),
        (("p2", "--share", "50%"), "--share: the scenario leak-linear doesn't have this option; its options: --rate"),
        (("p2", "--speed", "0"), "--speed 0: must be above 0, such as 60"),
        (("p2", "--fill", "150%"), "--fill '150%': must be above 0 and at most 100%, such as 50%"),
        (("p2", "--max", "0"), "--max '0': must be above 0"),
        (("p2", "--duration", "later"), "--duration 'later': expected a duration such as 30s"),
        (("p2", "--duration", "90d"), "--duration 90 d: must be at least 1 s and at most 2 d"),
        (("p2", "--workload", " "), "--workload: workload: expected a name"),
        (("stress", "--fill", "200%"), "--fill '200%': must be above 0"),
    ],
)
def test_wrong_use_is_one_line_with_the_remedy(arguments: tuple[str, ...], message: str):
    done = gpumond_here("loadgen", *arguments)
    out, err = done.stdout, done.stderr
    assert (done.returncode, out) == (2, "")
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith(("gpumond: ", "gpumond loadgen: "))]) == 1
    assert "Traceback" not in err


def test_directory_without_a_device_is_refused(tmp_path: Path):
    status, _, err = load(None, "steady", "--sim-device", str(tmp_path))
    assert status == 1
    assert "no simulated device" in err


DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "loadgen.md"


def printed(option: str) -> str:
    command = [sys.executable, "-m", "gpumond", "loadgen", option]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_document_lists_the_current_scenarios():
    text = DOCUMENT.read_text()
    for one in SCENARIOS.values():
        name = f"`{one.name}` ({one.alias})" if one.alias else f"`{one.name}`"
        assert f"| {name} | {one.summary} | {one.verdict or 'none'}{one.verdict_note} |\n" in text


def test_command_has_the_listed_options():
    options = re.compile(r"(?<!\S)--[a-z]+(?= )")
    assert set(options.findall(printed("--list"))) <= set(options.findall(printed("--help")))


LOAD = ("stress", "--fill", "50%", "--duration", "1s", "--speed", "3000", "--no-agent")


def card(directory: Path, size: int = SIZE) -> SimDevice:
    return create(directory, DeviceSpec("SIM-load", 0, "Simulated", size, context_bytes=CONTEXT))


def results(file: Path) -> list[dict[str, Any]]:
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({})
    return found


def test_results_are_appended_and_compared_with_the_last_complete_one(tmp_path: Path):
    device, file = card(tmp_path / "card"), tmp_path / "results.jsonl"
    file.write_text('{"outcome": "do')  # the machine stopped
    status, out, err = load(device, *LOAD, "--report", str(file))
    assert (status, "first result of this load on this device: no regression" in out) == (0, True), err
    empty = create(tmp_path / "missing", DeviceSpec("SIM-load", 0, "Simulated", SIZE))
    (empty.directory / "card.json").unlink()
    status, _, err = load(empty, *LOAD, "--report", str(file))
    assert status == 1
    status, out, err = load(device, *LOAD, "--json", "--report", str(file))
    assert status == 0, err
    incomplete, first, failed, last = results(file)
    assert incomplete == {}
    assert (first["compared_with"], first["regressions"], first["outcome"]) == (None, [], "done")
    assert failed["outcome"] == "error"
    assert failed["regressions"] == [f"the load couldn't run: {failed['detail']}"]
    assert json.loads(out)["compared_with"] == last["compared_with"] == first["started_at"]
    assert first["version"] == last["version"]
    status, _, _ = load(device, *LOAD[:-1], "--seed", "5", "--report", str(file))
    assert (status, results(file)[-1]["compared_with"]) == (0, None)


def test_smaller_peak_is_a_regression(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    assert load(card(tmp_path / "card"), *LOAD, "--report", str(file))[0] == 0
    status, out, _ = load(card(tmp_path / "smaller", SIZE // 2), *LOAD, "--report", str(file))
    assert status == 1
    assert "UTC: the peak of live memory fell from 4.0 GiB to " in out


def test_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path):
    status, out, err = load(card(tmp_path / "card"), *LOAD, "--report", str(tmp_path / "no" / "results"))
    assert (status, out) == (2, "")
    assert "--report" in err


DONE = {"outcome": "done", "detail": "", "wrong_words": 0, "checked_bytes": 5, "peak_live_bytes": 8 * GIB}


@pytest.mark.parametrize(
    ("now", "before", "found"),
    [
        ({}, None, []),
        ({}, {}, []),
        ({"wrong_words": 3}, None, ["3 incorrect words"]),
        ({"wrong_words": 3, "outcome": "stopped"}, {}, ["3 incorrect words"]),
        ({"outcome": "stopped", "peak_live_bytes": 1}, {}, []),
        ({"outcome": "full", "detail": "refused"}, {}, ["the load ended early: refused"]),
        ({"checked_bytes": 0}, {}, ["no contents were verified"]),
        ({"checked_bytes": 0}, {"checked_bytes": 0}, []),
        ({"peak_live_bytes": 7 * GIB}, {}, ["the peak of live memory fell from 8.0 GiB to 7.0 GiB"]),
        ({"peak_live_bytes": 7 * GIB}, {"peak_live_bytes": None}, []),
        ({"peak_live_bytes": 9 * GIB}, {}, []),
    ],
)
def test_regressions(now: dict[str, Any], before: dict[str, Any] | None, found: list[str]):
    assert regressions(DONE | now, None if before is None else DONE | before) == found
