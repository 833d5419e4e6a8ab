"""``gpumond why``: its text, the requests that it sends, and the selection of programs by all of its kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.messages import to_json
from gpumond.facts.units import GIB
from gpumond.features.agent_requests.command import findings, notes_on_excess, notes_on_quotas, notes_on_small_devices
from gpumond.features.agent_requests.routes import WHY_EXAMPLE, Why
from gpumond.serve.examples import LIVE_CLASSES
from gpumond.view.live_memory import why_lines as lines
from gpumond.view.text import time_text
from tests.helpers.frames import FakeDaemon, busy_frame, fake_daemon
from tests.helpers.running import gpumond_here, until
from tests.helpers.screens import terminal
from tests.helpers.values import make_pool, make_quotas, make_report

PATH = "/api/v1/agents/4242"
WHY: TypeAdapter[Why] = TypeAdapter(Why)
CLASSES = Why(classes=(LIVE_CLASSES,))


def shown(why: Why) -> list[str]:
    return [" ".join(line.split()) for line in lines(WHY.dump_python(why, mode="json"), {})]


def gpumond(fake: FakeDaemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return gpumond_here(*arguments, "--url", fake.url, GPUMOND_TOKEN="secret")


def run(fake: FakeDaemon, *options: str) -> subprocess.CompletedProcess[str]:
    return gpumond(fake, "why", "--pid", "4242", *options)


def test_classes_have_their_size_and_their_part_of_the_live_bytes():
    first, *classes = shown(CLASSES)
    assert first.endswith("40.0 GiB live")
    assert classes == [
        "4.0 GiB 10% parameters",
        "4.0 GiB 10% gradients",
        "8.0 GiB 20% optimizer state",
        "2.0 GiB 5% other leaf tensors",
        "22.0 GiB 55% activations and the rest",
    ]


def test_parts_of_others_and_the_age_and_the_pause_are_stated():
    found = replace(CLASSES, classes=(replace(LIVE_CLASSES, excess_bytes=GIB),), kv_cache_bytes=GIB)
    text = "\n".join(shown(replace(found, age_seconds=0.42, paused_seconds=0.105)))
    assert "40.0 GiB live, 0.4 s ago" in text
    assert "1.0 GiB of this is KV cache" in text
    assert "1.0 GiB of the live memory belongs to another allocator" in text
    assert "the program paused for at most 105 ms" in text


@pytest.mark.parametrize(
    ("unknown", "rest"),
    [
        (("tensors", "activations"), "24.0 GiB 60% other tensors and activations"),
        (("gradients", "optimizer", "buffers", "tensors", "activations"), "36.0 GiB 90% unknown"),
    ],
)
def test_unknown_classes_are_not_shown_as_others(unknown: Sequence[str], rest: str):
    without: dict[str, Any] = {f"{name}_bytes": None for name in unknown}
    why = replace(CLASSES, classes=(replace(LIVE_CLASSES, **without),), reason="too many objects")
    _, *classes, last = shown(why)
    assert len(classes) == 5 - len({*unknown} - {"buffers"}) + 1
    assert (classes[-1], last) == (rest, "too many objects")


def test_findings_state_value_threshold_and_remedy():
    verdict = {"pid": 7, "kind": "leak", "since": 1e6, "summary": "train leaks", "evidence": [["growth_bytes", GIB]]}
    alert = {"pid": 7, "rule": "cache", "phase": "firing", "active_at": 1e6, "fired_at": 2e6, "value": 2 * GIB}
    frame = {
        "verdicts": [verdict, verdict | {"pid": 8}, verdict | {"kind": "steady"}],
        "alerts": [
            alert,
            alert
            | {
                "rule": "leak",
                "annotations": [["summary", "train leaks; again since 00:01:02 UTC"]],
            },
            alert | {"rule": "quota-exceeded", "annotations": [["summary", "train uses 1.0 GiB more"]]},
            alert | {"pid": None},
        ],
    }
    rules = {"cache": {"value": "reclaimable_bytes", "above": GIB}, "leak": {"value": "leak", "above": 0}}
    first, remedy, *alerts = findings(frame, 7, rules)
    assert first == f"verdict leak since {time_text(1e6)}: train leaks"
    assert remedy == "  -> restart the program before the GPU is full"
    assert alerts == [
        f"alert cache firing since {time_text(2e6)}; reclaimable_bytes is 2.0 GiB (threshold: above 1.0 GiB)",
        "alert leak firing again since 00:01:02 UTC",
        f"alert quota-exceeded firing since {time_text(2e6)}: train uses 1.0 GiB more",
    ]


def test_sites_of_a_recording_and_advice_follow_the_classes():
    text = "\n".join(shown(WHY_EXAMPLE))
    assert "12.0 GiB train.py:31 step < train.py:50 main" in text
    assert "1.0 GiB allocated before the recording" in text
    for name in (
        "memory snapshot: /home/research",
        "stacks for flame graphs: /home/research",
        "advice: use a smaller batch",
    ):
        assert name in text


def test_recording_is_requested_and_its_stacks_fetched(tmp_path: Path):
    answer: Any = WHY.dump_python(WHY_EXAMPLE, mode="json")
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {f"{PATH}/why": (200, answer), f"{PATH}/snapshots/2": (200, "main 7")}
        done = run(fake, "--record", "60s", "--folded", os.fspath(tmp_path / "memory.folded"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == answer
    assert fake.requests == [(f"{PATH}/why", {"record_seconds": 60.0}), (f"{PATH}/snapshots/2", None)]
    assert (tmp_path / "memory.folded").read_text() == '"main 7"'


def test_ctrl_c_ends_the_wait_for_a_program():
    words = [sys.executable, "-m", "gpumond", "why", "--pid", "4242", "--record", "1m"]
    with fake_daemon(busy_frame()) as fake:
        fake.answers[f"{PATH}/why"] = None
        with subprocess.Popen([*words, "--url", fake.url], env=os.environ | {"GPUMOND_TOKEN": "x"}) as command:
            until(lambda: fake.requests)
            command.send_signal(signal.SIGINT)
            assert command.wait(15) == -signal.SIGINT


def test_program_with_a_case_is_referred_to_it():
    answer: Any = WHY.dump_python(WHY_EXAMPLE, mode="json")
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {f"{PATH}/why": (200, answer), "/api/v1/oom": (200, [{"pid": 8}])}
        without = run(fake).stdout
        fake.answers["/api/v1/oom"] = (200, [{"pid": int(PATH.rpartition("/")[2])}])
        found = run(fake).stdout
    assert "oom show" not in without
    assert "to see its newest out-of-memory error: " in found
    assert f"oom show --pid {PATH.rpartition('/')[2]}" in found


def test_refusal_of_the_program_is_the_message():
    refusal = {"detail": "this program's flush_policy is step: its history isn't recorded"}
    with fake_daemon(busy_frame()) as fake:
        fake.answers[f"{PATH}/why"] = (409, refusal)
        done = run(fake)
        wrong = run(fake, "--record", "soon")
    assert (done.returncode, done.stdout) == (1, "")
    assert refusal["detail"] in done.stderr
    assert (wrong.returncode, "--record 'soon': expected a duration" in wrong.stderr) == (2, True)


DEVICES = [
    {"uuid": f"GPU-{name}", "index": index, "pci_bus_id": "", "parent_uuid": None} for index, name in enumerate("ab")
]
AGENTS = [
    {
        "pid": pid,
        "workload": workload,
        "allows_limit": workload == "serve",
        "pools": [
            {"device_uuid": f"GPU-{device}", "allocator": "torch", "held_bytes": 0, "reclaimable": {"likely": 0}}
        ],
    }
    for pid, workload, device in ((3, "train", "b"), (1, "train", "a"), (2, "serve", "a"))
]
ANSWERS: dict[str, Any] = {
    "why": WHY.dump_python(CLASSES, mode="json"),
    "snapshot": {"allocator": "torch", "path": "/a", "size_bytes": 5, "reason": "", "id": 1},
    "limit": [{"allocator": "torch", "device_uuid": "GPU-a", "limit_bytes": GIB, "applied": True, "reason": ""}],
}


@pytest.mark.parametrize("command", ANSWERS)
@pytest.mark.parametrize(
    ("options", "pids"),
    [
        (["--pid", "2"], [2]),
        (["--workload", "train"], [1, 3]),
        (["--device", "0"], [1, 2]),
        (["--device", "GPU-b"], [3]),
    ],
)
def test_programs_are_selected_by_pid_workload_and_device(command: str, options: Sequence[str], pids: Sequence[int]):
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {"/api/v1/agents": (200, AGENTS), "/api/v1/devices": (200, DEVICES)}
        fake.answers |= {f"/api/v1/agents/{pid}/{command}": (200, ANSWERS[command]) for pid in (1, 2, 3)}
        size = ["1GiB"] if command == "limit" else []
        done = gpumond(fake, command, *size, *options)
        as_json = gpumond(fake, command, *size, *options, "--json")
    assert (done.returncode, done.stderr, as_json.returncode) == (0, "", 0)
    asked = [path for path, _ in fake.requests if path.endswith(command)]
    assert sorted(asked) == sorted(2 * [f"/api/v1/agents/{pid}/{command}" for pid in pids])
    found = json.loads(as_json.stdout)
    if "--pid" in options:
        assert found == ANSWERS[command]
    else:
        assert [one["pid"] for one in found] == pids
        assert all(f"train (pid {pid})" in done.stdout for pid in pids if pid != 2 and command != "limit")


def test_limit_names_the_program_with_a_pid():
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {"/api/v1/agents": (200, AGENTS), "/api/v1/devices": (200, DEVICES)}
        fake.answers["/api/v1/agents/10/limit"] = (200, ANSWERS["limit"])
        done = gpumond(fake, "limit", "1GiB", "--pid", "10")
    assert done.stdout.splitlines()[1].split()[:3] == ["10", "train", "torch"]


@pytest.mark.parametrize("command", ANSWERS)
def test_selection_of_no_program_is_nothing_to_do(command: str):
    size = ["1GiB"] if command == "limit" else []
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {"/api/v1/agents": (200, AGENTS), "/api/v1/devices": (200, DEVICES)}
        none = gpumond(fake, command, *size, "--workload", "other")
        device = gpumond(fake, command, *size, "--device", "7")
        missing = gpumond(fake, command, *size)
    assert (none.returncode, "no program with an agent matches workload other" in none.stderr) == (3, True)
    assert (device.returncode, missing.returncode) == (2, 2)
    assert "--workload" in missing.stderr


@pytest.mark.parametrize(("command", "option"), [("why", "--folded"), ("snapshot", "--out")])
def test_file_of_several_programs_is_refused_with_their_names(tmp_path: Path, command: str, option: str):
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/agents"] = (200, AGENTS)
        record = ("--record", "1s") if command == "why" else ()
        done = gpumond(fake, command, "--workload", "train", option, os.fspath(tmp_path / "file"), *record)
    assert done.returncode == 2
    assert f"{option} needs one process, but 2 match: train (pid 1), train (pid 3)" in done.stderr


def test_program_that_refuses_does_not_hide_the_answers_of_others():
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/agents"] = (200, AGENTS)
        fake.answers |= {"/api/v1/agents/1/why": (409, {"detail": "no"}), "/api/v1/agents/3/why": (200, ANSWERS["why"])}
        done = gpumond(fake, "why", "--workload", "train")
    assert (done.returncode, done.stderr) == (1, "gpumond: train (pid 1): no\n")
    assert done.stdout.startswith("train (pid 3):\n")


@pytest.mark.parametrize(
    ("live", "cached", "lines"),
    [
        (1, 1, []),
        (1, 2, []),
        (3, 1, ["unless it frees 1.0 GiB besides its cache (1.0 GiB)"]),
        (3, 0, ["unless it frees 1.0 GiB"]),
    ],
)
def test_a_limit_below_what_a_program_holds_states_what_follows(live: int, cached: int, lines: list[str]):
    pool = make_pool(live=live * GIB, cached=cached * GIB)
    agent = json.loads(to_json(make_report(10, (pool,))))
    start = f"train (pid 10) holds {live + cached}.0 GiB: with this limit, its next allocation from the driver fails "
    assert (
        list(notes_on_excess(agent, 2 * GIB, None))
        == list(notes_on_excess(agent, 2 * GIB, "GPU-a"))
        == [start + line for line in lines]
    )
    assert not list(notes_on_excess(agent, 2 * GIB, "GPU-b"))


@pytest.mark.parametrize(
    ("options", "answer", "limited"), [((), "n", False), ((), "y", True), (("--yes",), "", True), ((), None, True)]
)
def test_on_a_terminal_a_limit_below_what_a_program_holds_is_confirmed(
    options: Sequence[str], answer: str | None, limited: bool
):
    agent = AGENTS[1] | {"allows_limit": True, "pools": json.loads(to_json([make_pool(live=3 * GIB)]))}
    with fake_daemon(busy_frame()) as fake:
        fake.answers["/api/v1/agents"] = (200, [agent])
        fake.answers["/api/v1/agents/1/limit"] = (200, [])
        arguments = ["limit", "train", "2GiB", *options, "--url", fake.url]
        if answer is None:
            done = gpumond_here(*arguments, GPUMOND_TOKEN="secret")
            code, written = done.returncode, done.stderr
        else:
            with terminal([sys.executable, "-m", "gpumond", *arguments], (200, 20), GPUMOND_TOKEN="secret") as session:
                if answer:
                    session.shows("Limit to 2.0 GiB?")
                    session.press(answer, "\n")
                code, written = session.ends(), session.written
        sent = [path for path, _ in fake.requests if path.endswith("/limit")]
    assert (code, len(sent)) == ((0, 1) if limited else (1, 0)), written
    assert ("fails unless it frees" in written) == (not options)
    assert ("nothing was limited" in written) == (not limited)
    assert "--yes" not in written


def test_limit_above_that_of_a_quota_is_said_to_be_set_again():
    pool = make_pool(live=20 * GIB)
    report = make_report(10, (pool,))
    frame = busy_frame(reports=(report,), quotas=make_quotas(report, (25 * GIB, ""), (30 * GIB, "team"), (1, "team")))
    again = ["the team quota will soon reset the limit of train (pid 10) to 30.0 GiB"]
    assert [list(notes_on_quotas(frame, limit, {10})) for limit in (None, 40 * GIB, 30 * GIB)] == [again, again, []]
    assert list(notes_on_quotas(frame, None, {11})) == []


def test_limit_above_the_size_of_its_gpu_is_said_to_have_no_effect():
    said = ["this limit has no effect on GPU 0, which has only 80.0 GiB"]
    limits = (None, 80 * GIB, 81 * GIB)
    assert [list(notes_on_small_devices(busy_frame(), limit, {"GPU-a"})) for limit in limits] == [[], [], said]
    assert list(notes_on_small_devices(busy_frame(), 81 * GIB, set())) == []
