"""Plans and flushes on several machines, with fakes of daemons."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.connection import Client, Credentials, Machine, parse_machine
from gpumond.features.fleet.flush import FlushOptions, ProcessResult, flush_waves, read_plan, receipts_result
from gpumond.features.fleet.plan import (
    Criteria,
    FleetLimits,
    PlannedFlush,
    Replicas,
    parse_max_unavailable,
    plan_waves,
    refuse_beyond_limits,
)
from gpumond.view.frame import receipts_of
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.stubs import Answer, fleet, receipt, stub, write_targets
from tests.helpers.values import make_device, make_pool, make_process, make_report

CLIENT = Client(Credentials(ssl_context=ssl.create_default_context()), 60.0)


def frame() -> dict[str, Any]:
    reports = (make_report(10, (make_pool(live=GIB, cached=GIB),), workload="train"),)
    return make_frame(make_device(used_bytes=2 * GIB, processes=(make_process(10, 2 * GIB),)), reports=reports)


def test_machine_that_does_not_answer_does_not_delay_the_others():
    read: list[str] = []

    def answer(path: str, body: str) -> Answer:
        read.append(path)
        if len(read) == 3:  # the connection of the fourth ends when the others have been read
            silent.over.set()
        return 200, frame()

    with stub(lambda path, body: None) as silent, stub(answer) as present:
        machines = [parse_machine(silent.address, {"instance": "slow"})]
        machines += [parse_machine(present.address, {"instance": f"node-{number}"}) for number in range(3)]
        selected = [(each, None) for each in machines]
        planned, missing, _ = asyncio.run(read_plan(CLIENT, selected, Criteria(workload="train"), 4))
    assert [(each.machine.name, each.pid) for each in planned] == [(f"node-{number}", 10) for number in range(3)]
    assert [each.machine for each in missing] == ["slow"]


def answers(outcomes: dict[int, str]) -> Any:
    """Return a daemon whose programs have these outcomes by pid; the others release the memory that they expect."""

    def answer(path: str, body: str) -> Answer:
        pid = json.loads(body)["target"]["pid"]
        outcome = outcomes.get(pid, "freed")
        if outcome == "busy":
            return 409, {"detail": "the process is being flushed"}
        expected = {"low": GIB, "likely": GIB, "high": GIB, "exactness": "exact"}
        return 200, {"receipts": [receipt(outcome, expected=expected, released_bytes=GIB * (outcome == "freed"))]}

    return answer


def carried_out(
    outcomes: dict[int, str], plan_waves: list[list[int]], **options: Any
) -> tuple[list[tuple[int, int, str]], str]:
    """Return wave, pid and result of each program, and the reason of the last one."""
    with stub(answers(outcomes)) as served:
        own = Machine("a", f"http://{served.address}")
        order = [[PlannedFlush(machine=own, pid=pid, start_ticks=1) for pid in wave] for wave in plan_waves]
        found: list[ProcessResult] = asyncio.run(flush_waves(CLIENT, order, FlushOptions(**options)))
    return [(each.wave, each.planned.pid, each.result) for each in found], found[-1].reason


def results(outcomes: dict[int, str], plan_waves: list[list[int]], **options: Any) -> list[str]:
    return [result for _, _, result in carried_out(outcomes, plan_waves, **options)[0]]


ALONE = [[1], [2], [3], [4]]
FAILING = {1: "failed", 3: "failed"}


def test_flushes_stop_after_the_number_of_failures():
    found, reason = carried_out(FAILING, ALONE, max_failures=2)
    assert found == [(1, 1, "failed"), (2, 2, "flushed"), (3, 3, "failed"), (4, 4, "skipped")]
    assert reason == "the flushes stopped after 2 failed"
    assert results(FAILING, ALONE, max_failures=1) == ["failed", "skipped", "skipped", "skipped"]
    assert results(FAILING, ALONE, max_failures=3) == ["failed", "flushed", "failed", "flushed"]


def test_failure_stops_the_rest_of_its_wave():
    assert results({2: "failed"}, [[1, 2, 3, 4]], concurrency=1) == ["flushed", "failed", "skipped", "skipped"]


def test_canary_that_fails_or_releases_too_little_stops_the_flushes():
    failed, _ = carried_out({1: "failed"}, [[1], [2, 3]], max_failures=9, canary=True)
    assert failed == [(1, 1, "failed"), (2, 2, "skipped"), (2, 3, "skipped")]
    found, reason = carried_out({1: "partial"}, [[1], [2, 3]], canary=True)
    assert [result for _, _, result in found] == ["flushed", "skipped", "skipped"]
    assert reason == "the flushes stopped after the first one: it released 0 B of the 1.0 GiB expected"
    assert results({1: "partial"}, [[1], [2, 3]]) == ["flushed", "flushed", "flushed"]


def test_refused_canary_is_replaced_by_the_next_program():
    found, _ = carried_out({1: "busy"}, [[1], [2, 3, 4]], canary=True)
    assert found == [(1, 1, "refused"), (2, 2, "flushed"), (3, 3, "flushed"), (3, 4, "flushed")]
    assert results({1: "busy", 2: "failed"}, [[1], [2, 3, 4]], canary=True) == [
        "refused",
        "failed",
        "skipped",
        "skipped",
    ]


def serving(sleeping: bool) -> dict[str, Any]:
    """Return the frame of a machine with the engine chat."""
    processes = (EngineProcess(10, 100),)
    engine = EngineReading(
        name="chat", kind="vllm", up=True, methods=("sleep",), sleeping=sleeping, processes=processes
    )
    return make_frame(make_device(used_bytes=2 * GIB, processes=(make_process(10, 2 * GIB),)), engines=(engine,))


@pytest.mark.parametrize(
    ("command", "sleeping", "outcome", "total"),
    [("sleep", False, "freed", "2.0 GiB released"), ("wake", True, "woken", "0 B released")],
)
def test_engines_sleep_and_wake(tmp_path: Path, command: str, sleeping: bool, outcome: str, total: str):

    def answer(path: str, body: str) -> Answer:
        if not body:
            return 200, serving(sleeping)
        return 200, {"receipts": [receipt(outcome, released_bytes=0 if sleeping else GIB)]}

    with stub(answer) as first, stub(answer) as second:
        file = write_targets(tmp_path / "targets.json", {"node-1": first.address, "node-2": second.address})
        keep = ["--keep", "0"] if command == "sleep" else []
        given = ["--targets", str(file), "--engine", "ch*"]
        shown = fleet(command, *given, *keep, "--max-parallel", "1", "--reason", "night", "--yes")
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "2 engines on 2 machines in 2 waves" in shown.stdout
        assert total in shown.stdout.splitlines()
        assert fleet(command, "--targets", str(file), "--engine", "ch*", stdin="n\n").returncode == 1
        assert fleet(command, "--targets", str(file), "--engine", "other", "--yes").returncode == 3
        bodies = [json.loads(body) for each in (first, second) for _, _, body in each.requests if body]
    operations = [body.pop("operation") for body in bodies]
    assert operations[0] == operations[1]
    assert operations[0]["reason"] == "night"
    assert f"\noperation {operations[0]['id']}\n" in shown.stdout
    undo = f"to undo: gpumond fleet undo --targets {file} {operations[0]['id']}"
    assert shown.stdout.splitlines()[-1] == (undo if command == "sleep" else total)
    expected = {"target": {"workload": "chat"}, "steps": ["engine"], "timeout_seconds": 30.0}
    assert bodies == [expected | ({"wake": True} if command == "wake" else {})] * 2


def test_last_replica_of_a_service_stays_awake(tmp_path: Path):
    with stub(lambda path, body: (200, serving(False))) as up, stub(lambda path, body: (200, serving(True))) as down:
        addresses = {"node-1": up.address, "node-2": up.address, "node-3": up.address, "node-4": down.address}
        file = str(write_targets(tmp_path / "targets.json", addresses))

        def due(*options: str) -> list[str]:
            shown = fleet("sleep", "--targets", file, "--engine", "chat", "--dry-run", "--json", *options)
            return [each["machine"] for each in json.loads(shown.stdout)["plan"] if not each["refusal"]]

        assert due() == ["node-1", "node-2"]
        assert due("--keep", "2") == ["node-1"]
        assert due("--keep", "0") == ["node-1", "node-2", "node-3"]
        assert due("--max-unavailable", "50%") == ["node-1"]
        assert due("--max-unavailable", "1") == []
        assert due("--machine", "node-3") == ["node-3"]  # the others stay awake
        assert due("--machine", "node-3", "--keep", "3") == []
        refused = fleet("sleep", "--targets", file, "--engine", "chat", "--max-unavailable", "120%")
        assert (refused.returncode, "such as 3 or 25%" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "engine"], "--step 'engine': expected one of gc, "),
        (["--max-machines", "0"], "--max-machines must be above 0"),
        (["--reason", "x" * 201], "at most 200 characters"),
        (["--label", "zone"], "expected NAME=PATTERN"),
    ],
)
def test_limits_that_are_not_valid_are_refused(tmp_path: Path, options: list[str], message: str):
    file = write_targets(tmp_path / "targets.json", {})
    refused = fleet("flush", "--targets", str(file), "--workload", "x", *options)
    assert refused.returncode == 2
    assert message in refused.stderr


def test_long_reason_of_many_machines_is_below_the_table_once(tmp_path: Path):
    reason = "this endpoint requires a token of the scope flush, which the daemon of this machine defines"

    def answer(path: str, body: str) -> Answer:
        return (401, {"detail": reason}) if body else (200, frame())

    with stub(answer) as served:
        file = write_targets(tmp_path / "targets.json", {f"node-{number}": served.address for number in range(3)})
        given = ["--targets", str(file), "--workload", "train", "--max-failures", "9", "--no-canary", "--yes"]
        shown = fleet("flush", *given)
    assert shown.returncode == 1
    assert shown.stdout.count(reason) == 1
    assert sum(line.endswith("[1]") for line in shown.stdout.splitlines()) == 3


def test_top_shows_several_machines_in_one_table(tmp_path: Path):
    with stub(lambda path, body: (200, frame())) as served, stub(lambda path, body: (200, {})) as other:
        addresses = {"node-1": served.address, "node-2": served.address}
        file = write_targets(tmp_path / "targets.json", addresses)
        shown = fleet("top", "--targets", str(file), "--once")
        assert shown.returncode == 0, shown.stderr
        assert all(shown.stdout.count(f"{name}:0") >= 1 for name in addresses), shown.stdout
        legend = shown.stdout.splitlines()[2]  # after one line for each of the two devices
        assert "live" in legend
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
        assert "isn't a terminal" in fleet("top", "--targets", str(file)).stderr


def planned(pid: int, machine: str = "a", **fields: Any) -> PlannedFlush:
    own = Machine(machine, f"http://{machine}:9917")
    return PlannedFlush(machine=own, pid=pid, start_ticks=1, **fields)


def rank(pid: int, job: str = "slurm/7", **fields: Any) -> PlannedFlush:
    return planned(pid, f"node-{pid}", **{"workload": "train", "job": job, "ranks": 6} | fields)


def pids(found: list[list[PlannedFlush]]) -> list[list[int]]:
    return [[each.pid for each in wave] for wave in found]


def test_ranks_of_a_job_are_in_one_wave():
    ranks = [rank(pid) for pid in range(6)]
    others = [planned(10), planned(11)]
    assert pids(plan_waves([*ranks[:3], *others, *ranks[3:]], 4)) == [[0, 1, 2, 3, 4, 5], [10, 11]]


def test_wave_has_at_most_the_number_of_processes():
    assert pids(plan_waves([planned(pid) for pid in range(5)], 2)) == [[0, 1], [2, 3], [4]]
    assert plan_waves([], 2, canary=True) == []


def test_programs_of_one_workload_are_independent():
    assert pids(plan_waves([planned(pid, f"node-{pid}", workload="serving") for pid in range(3)], 1)) == [[0], [1], [2]]


def test_jobs_with_the_same_workload_are_independent():
    assert pids(plan_waves([rank(1, "slurm/7"), rank(2, "slurm/8"), rank(3, "slurm/7")], 1)) == [[1, 3], [2]]
    assert pids(plan_waves([rank(1, user="ada"), rank(2, user="grace")], 1)) == [[1], [2]]


def test_ranks_without_a_job_are_grouped_by_workload_user_and_number():
    ranks = [rank(1, ""), rank(2, ""), rank(3, "", ranks=2), rank(4, "", workload="other"), rank(5, "", user="ada")]
    assert pids(plan_waves(ranks, 1)) == [[1, 2], [3], [4], [5]]


def test_first_wave_with_a_canary_is_one_job_that_would_release_memory():
    programs = [planned(1), rank(2, likely_bytes=5), planned(3, likely_bytes=5), rank(4, likely_bytes=5)]
    assert pids(plan_waves(programs, 8, canary=True)) == [[2, 4], [1, 3]]
    assert pids(plan_waves([planned(1), planned(2)], 8, canary=True)) == [[1], [2]]


def refused(found: list[PlannedFlush]) -> dict[int, str]:
    return {each.pid: each.refusal for each in found if each.refusal}


def test_flushes_beyond_the_limit_of_machines_are_refused_by_job():
    programs = [planned(10, "node-1"), rank(1), rank(2), rank(3), planned(11, "node-9"), planned(12, "node-1")]
    assert refused(refuse_beyond_limits(programs, FleetLimits(max_machines=2))) == dict.fromkeys(
        (1, 2, 3), "beyond the limit of machines (--max-machines 2)"
    )
    assert refused(refuse_beyond_limits(programs, FleetLimits(max_machines=4))) == {}
    assert refused(refuse_beyond_limits(programs, FleetLimits())) == {}


def engine(pid: int, name: str = "chat", **fields: Any) -> PlannedFlush:
    return planned(pid, f"node-{pid}", engine=name, workload=name, **fields)


def test_engines_of_a_service_that_must_stay_awake_are_refused():
    engines = [engine(1), engine(2, refusal="it is busy"), engine(3), engine(4, "embed")]
    services = {"chat": Replicas(4, 3), "embed": Replicas(1, 1)}
    assert refused(refuse_beyond_limits(engines, FleetLimits(keep=2), services)) == {
        2: "it is busy",
        3: "the engine is one of the last 2 replicas awake (--keep 2)",
        4: "the engine is the last replica awake (--keep 2)",
    }
    assert set(refused(refuse_beyond_limits(engines, FleetLimits(keep=0), services))) == {2}
    assert refused(
        refuse_beyond_limits(engines, FleetLimits(max_unavailable=parse_max_unavailable("50%")), services)
    ) == {
        2: "it is busy",
        3: "3 of 4 replicas would be unavailable (--max-unavailable 50%)",
        4: "1 of 1 replicas would be unavailable (--max-unavailable 50%)",
    }


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        (("freed",), "flushed"),
        (("nothing",), "flushed"),
        (("freed", "refused"), "flushed"),
        (("refused", "refused"), "refused"),
        (("freed", "timeout"), "failed"),
        (("failed",), "failed"),
        ((), "failed"),
    ],
)
def test_result_of_a_process_is_that_of_its_receipts(outcomes: tuple[str, ...], result: str):
    found = receipts_result(planned(1), 1, [receipt(outcome) for outcome in outcomes])
    assert (found.result, found.released_bytes) == (result, 5 * len(outcomes))


@pytest.mark.parametrize("fields", [{"released_bytes": "x"}, {"expected": {"low": 1}}, {"expected": 5}])
def test_receipt_of_another_form_is_refused(fields: dict[str, Any]):
    assert receipts_of({"receipts": [receipt("freed")]})[0]["released_bytes"] == 5
    with pytest.raises(DaemonError, match="incompatible version"):
        receipts_of({"receipts": [receipt("freed", **fields)]})
