"""Plans and flushes on several machines, with fakes of daemons."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.features.fleet.connection import Access, Client, Machine, machine
from gpumond.features.fleet.flush import Criteria, FlushOptions, PlannedFlush, ProcessResult, carry_out, plan
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.stubs import Answer, fleet, receipt, stub, write_targets
from tests.helpers.values import make_device, make_pool, make_process, make_report

CLIENT = Client(Access(trust=ssl.create_default_context()), 60.0)


def frame() -> dict[str, Any]:
    reports = (make_report(10, (make_pool(live=GIB, cached=GIB),), workload="train"),)
    return make_frame(make_device(used_bytes=2 * GIB, processes=(make_process(10, 2 * GIB),)), reports=reports)


def test_machine_that_does_not_answer_does_not_delay_the_others():
    with stub(lambda path, body: None) as silent, stub(lambda path, body: (200, frame())) as present:
        machines = [machine(silent.address, {"instance": "slow"})]
        machines += [machine(present.address, {"instance": f"node-{number}"}) for number in range(3)]
        read: list[None] = []

        def done() -> None:
            read.append(None)
            if len(read) == 3:  # the connection of the fourth ends when the others have been read
                silent.over.set()

        selected = [(each, None) for each in machines]
        planned, missing = asyncio.run(plan(CLIENT, selected, Criteria(workload="train"), 4, done))
    assert [(each.machine.name, each.pid) for each in planned] == [(f"node-{number}", 10) for number in range(3)]
    assert [each.machine for each in missing] == ["slow"]


def answers(failing: set[int]) -> Any:
    """Return a daemon whose programs with these pids fail."""

    def answer(path: str, body: str) -> Answer:
        outcome = "failed" if json.loads(body)["target"]["pid"] in failing else "freed"
        return 200, {"receipts": [receipt(outcome, released_bytes=0)]}

    return answer


def carried_out(failing: set[int], max_failures: int) -> list[ProcessResult]:
    with stub(answers(failing)) as served:
        own = Machine("a", f"http://{served.address}")
        waves = [[PlannedFlush(machine=own, pid=pid, start_ticks=1)] for pid in range(1, 5)]
        return asyncio.run(carry_out(CLIENT, waves, FlushOptions(max_failures=max_failures)))


def test_flushes_stop_after_the_number_of_failures():
    found = carried_out({1, 3}, 2)
    assert [(each.wave, each.result) for each in found] == [
        (1, "failed"),
        (2, "flushed"),
        (3, "failed"),
        (4, "skipped"),
    ]
    assert found[-1].reason == "the flushes stopped after 2 failed"
    assert [each.result for each in carried_out({1, 3}, 1)] == ["failed", "skipped", "skipped", "skipped"]
    assert [each.result for each in carried_out({1, 3}, 3)] == ["failed", "flushed", "failed", "flushed"]


def serving(asleep: bool) -> dict[str, Any]:
    """Return the frame of a machine with the engine chat."""
    processes = (EngineProcess(10, 100),)
    engine = EngineReading(name="chat", kind="vllm", up=True, methods=("sleep",), asleep=asleep, processes=processes)
    return make_frame(make_device(used_bytes=2 * GIB, processes=(make_process(10, 2 * GIB),)), engines=(engine,))


@pytest.mark.parametrize(
    ("command", "asleep", "outcome", "total"),
    [("sleep", False, "freed", "2.0 GiB released"), ("wake", True, "woken", "0 B released")],
)
def test_engines_sleep_and_wake(tmp_path: Path, command: str, asleep: bool, outcome: str, total: str):

    def answer(path: str, body: str) -> Answer:
        if not body:
            return 200, serving(asleep)
        return 200, {"receipts": [receipt(outcome, released_bytes=0 if asleep else GIB)]}

    with stub(answer) as first, stub(answer) as second:
        file = write_targets(tmp_path / "targets.json", {"node-1": first.address, "node-2": second.address})
        shown = fleet(command, "--targets", str(file), "--engine", "ch*", "--max-parallel", "1", "--yes")
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "2 engines on 2 machines in 2 waves" in shown.stdout
        assert shown.stdout.splitlines()[-1] == total
        assert fleet(command, "--targets", str(file), "--engine", "ch*", stdin="n\n").returncode == 2
        assert fleet(command, "--targets", str(file), "--engine", "other", "--yes").returncode == 3
        bodies = [json.loads(body) for each in (first, second) for _, _, body in each.requests if body]
    expected = {"target": {"workload": "chat"}, "steps": ["engine"], "timeout_seconds": 30.0}
    assert bodies == [expected | ({"wake": True} if command == "wake" else {})] * 2


def test_step_engine_is_a_step_of_its_own(tmp_path: Path):
    file = write_targets(tmp_path / "targets.json", {})
    refused = fleet("flush", "--targets", str(file), "--workload", "x", "--step", "engine", "--step", "cache")
    assert refused.returncode == 2
    assert "cannot be combined with other steps" in refused.stderr


def test_top_shows_several_machines_in_one_table(tmp_path: Path):
    with stub(lambda path, body: (200, frame())) as served, stub(lambda path, body: (200, {})) as other:
        addresses = {"node-1": served.address, "node-2": served.address}
        file = write_targets(tmp_path / "targets.json", addresses)
        shown = fleet("top", "--targets", str(file), "--once")
        assert shown.returncode == 0, shown.stderr
        assert all(shown.stdout.count(f"{name}:0") >= 1 for name in addresses), shown.stdout
        file = write_targets(tmp_path / "targets.json", {**addresses, "other": other.address})
        failed = fleet("top", "--targets", str(file), "--once")
        assert failed.returncode == 1
        assert failed.stdout.splitlines()[-1].endswith("incompatible version (frame.version: expected a value)")
        document = json.loads(fleet("top", "--targets", str(file), "--once", "--json").stdout)
        assert [(each["machine"], each["frame"] is None) for each in document] == [
            ("node-1", False),
            ("node-2", False),
            ("other", True),
        ]
        assert "not a terminal" in fleet("top", "--targets", str(file)).stderr
