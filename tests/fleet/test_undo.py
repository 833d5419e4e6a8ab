"""`gpumond fleet undo`: which changes are undone, and which are not, with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.features.fleet.undo import outdated_reason, undo_steps
from tests.helpers import forks
from tests.helpers.agents import GIB
from tests.helpers.stubs import Answer, SimulatedMachine, fleet, simulated, stub, write_targets

OPERATION = "20261126-120000-abcdef"
GPU = "GPU-1"


def entry(action: str, at: float = 1.0, operation: str = OPERATION, **detail: Any) -> dict[str, Any]:
    return {"machine": "m", "seq": 1, "at": at, "actor": "token", "action": action, "detail": detail} | {
        "detail": {"operation": operation, **detail}
    }


def limit(before: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the entry of a limit of 8 GiB on all devices."""
    about = {"pid": 7, "start_ticks": 70, "workload": "train"}
    return entry("agent.limit", **about, limit_bytes=8 * GIB, device=None, before=before or {})


@pytest.mark.parametrize(
    ("recorded", "text", "problem"),
    [
        (entry("flush.request", target="workload chat", steps=["engine"]), "wake the engine chat", ""),
        (entry("flush.request", target="workload chat (uid 5)", steps=["engine"]), "wake the engine chat", ""),
        (entry("flush.request", target="workload chat", steps=["engine"], wake=True), "", "use gpumond fleet sleep"),
        (entry("flush.request", target="pid 7", steps=["cache"]), "", "a flush has released caches"),
        (limit(), "remove the limit of pid 7", ""),
        (limit(before={GPU: 2 * GIB}), "limit pid 7 to 2.0 GiB on GPU-1", ""),
        (entry("silence.create", id="5b0e"), "end the silence 5b0e", ""),
        (entry("suspend.receipt", pid=7, start_ticks=70, outcome="suspended"), "resume pid 7", ""),
        (entry("quota.create", name="x"), "", "can't undo this kind of change"),
        (entry("silence.create", omitted_bytes=9000), "", "its entry in the audit log was shortened"),
    ],
)
def test_entry_has_what_undoes_it_or_the_reason(recorded: dict[str, Any], text: str, problem: str):
    (step,) = undo_steps([recorded], OPERATION)
    assert step.text == text
    assert problem in step.problem
    assert bool(step.problem) is bool(problem)


def test_results_and_other_operations_have_no_step():
    others = [
        entry("flush.receipts"),
        entry("agent.limit.answer", pid=7),
        entry("suspend.receipt", pid=7, start_ticks=70, outcome="refused"),
        entry("silence.create", operation="another", id="1"),
    ]
    assert undo_steps(others, OPERATION) == []


def test_newest_change_is_undone_first():
    found = undo_steps([entry("silence.create", 1.0, id="a"), entry("silence.create", 2.0, id="b")], OPERATION)
    assert [step.subject for step in found] == ["b", "a"]


@pytest.mark.parametrize(
    ("limits", "start_ticks", "reason"),
    [
        ([(GPU, 8 * GIB, "")], 70, ""),
        ([(GPU, 8 * GIB, ""), ("GPU-2", 8 * GIB, ""), (GPU, GIB, "team")], 70, ""),
        ([(GPU, 4 * GIB, "")], 70, "the limit has been changed since"),
        ([], 70, "the limit has been changed since"),
        ([(GPU, 8 * GIB, "")], 71, "the program has exited"),
    ],
)
def test_limit_is_undone_only_while_it_is_the_present_one(
    limits: list[tuple[str, int, str]], start_ticks: int, reason: str
):
    (step,) = undo_steps([limit()], OPERATION)
    own = [{"device_uuid": uuid, "limit_bytes": size, "quota": quota} for uuid, size, quota in limits]
    report = {"pid": 7, "start_ticks": start_ticks, "limits": own}
    frame: Any = {"snapshot": {"reports": [report]}}
    assert outdated_reason(step, frame) == reason


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[list[SimulatedMachine]]:
    with simulated(tmp_path_factory.mktemp("undo"), nvml_library, {"gpu-1": {"train": {}}, "gpu-2": {}}) as started:
        yield started


@pytest.fixture(scope="module")
def given(machines: list[SimulatedMachine], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("list")
    targets = write_targets(directory / "all.json", {each.name: each.address for each in machines})
    tokens = directory / "tokens.yaml"
    tokens.touch(0o600)
    tokens.write_text("".join(f"{each.name}: {each.token}\n" for each in machines))
    return ["--targets", str(targets), "--tokens", str(tokens)]


def command(machine: SimulatedMachine, operation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a gpumond command on a machine, as a part of an operation."""
    environ = {**os.environ, "GPUMOND_URL": machine.daemon.url, "GPUMOND_TOKEN": machine.token}
    argv = [sys.executable, "-m", "gpumond", *arguments]
    return forks.run(argv, env={**environ, "GPUMOND_OPERATION": operation})


def active(machine: SimulatedMachine) -> int:
    return sum(each["state"] == "active" for each in machine.daemon.get("silences"))


@pytest.mark.slow
def test_silences_of_an_operation_are_ended_on_all_machines(machines: list[SimulatedMachine], given: list[str]):
    for operation in ("OPS-1", "OPS-2"):
        for machine in machines:
            done = command(machine, operation, "silence", "add", "rule=leak", "--for", "1h", "--reason", operation)
            assert done.returncode == 0, done.stderr
    assert [active(machine) for machine in machines] == [2, 2]
    plan = fleet("undo", *given, "OPS-1", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "2 changes on 2 machines can be undone" in plan.stdout
    assert [active(machine) for machine in machines] == [2, 2]
    assert fleet("undo", *given, "OPS-1", stdin="n\n").returncode == 1
    undone = json.loads(fleet("undo", *given, "OPS-1", "--yes", "--json").stdout)
    assert [each["result"] for each in undone["results"]] == ["undone", "undone"]
    assert [active(machine) for machine in machines] == [1, 1]
    shown = fleet("audit", *given, "--operation", "OPS-1").stdout
    assert shown.count("(operation OPS-1)") == 2
    assert fleet("undo", *given, "OPS-3", "--yes").returncode == 3


@pytest.mark.slow
def test_flush_is_not_undone(machines: list[SimulatedMachine], given: list[str]):
    flushed = json.loads(fleet("flush", *given, "--workload", "train", "--yes", "--json").stdout)
    undone = fleet("undo", *given, flushed["operation"], "--yes")
    assert undone.returncode == 3
    assert "a flush has released caches, which programs fill again as they need them" in undone.stdout
    assert "nothing can be undone" in undone.stdout


@pytest.mark.slow
def test_header_of_another_form_is_refused(machines: list[SimulatedMachine]):
    done = command(machines[0], "no spaces", "silence", "add", "rule=leak", "--for", "1h", "--reason", "x")
    assert done.returncode == 1
    assert "Gpumond-Operation: expected 1 to 64 characters" in done.stderr


def test_suspended_programs_are_resumed_and_others_left(tmp_path: Path):
    suspended = [{"pid": 7, "start_ticks": 70}]
    entries = [
        entry("suspend.receipt", 1.0, pid=7, start_ticks=70, outcome="suspended", workload="a"),
        entry("suspend.receipt", 2.0, pid=8, start_ticks=80, outcome="suspended", workload="b"),
    ]
    asked = []

    def answer(path: str, body: str) -> Answer:
        if path == "/api/v1/audit":
            return 200, entries
        if path == "/api/v1/suspensions":
            return 200, suspended
        asked.append((path, json.loads(body)))
        return 200, {"receipts": [{"outcome": "resumed", "reason": ""}]}

    with stub(answer) as served:
        targets = write_targets(tmp_path / "all.json", {"gpu-1": served.address})
        done = json.loads(fleet("undo", "--targets", str(targets), OPERATION, "--yes", "--json").stdout)
    assert asked == [("/api/v1/resumptions", {"target": {"pid": 7}})]
    assert [(each["undo"], each["result"], each["reason"]) for each in done["results"]] == [
        ("resume pid 8", "refused", "the program isn't suspended anymore"),
        ("resume pid 7", "undone", ""),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bad id",), "OPERATION: expected the ID that a `gpumond fleet` command printed: 1 to 64 characters"),
        (("x", "--json"), "--json requires --yes or --dry-run"),
    ],
)
def test_wrong_use_exits_with_2(arguments: tuple[str, ...], message: str):
    refused = fleet("undo", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
