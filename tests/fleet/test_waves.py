"""Waves of flushes, and the result for a process from its receipts."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.flush import result_of
from gpumond.features.fleet.plan import Limits, PlannedFlush, Replicas, limited, parse_unavailable, waves
from gpumond.view.frame import receipts_of
from tests.helpers.stubs import receipt


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
    assert pids(waves([*ranks[:3], *others, *ranks[3:]], 4)) == [[0, 1, 2, 3, 4, 5], [10, 11]]


def test_wave_has_at_most_the_number_of_processes():
    assert pids(waves([planned(pid) for pid in range(5)], 2)) == [[0, 1], [2, 3], [4]]
    assert waves([], 2, canary=True) == []


def test_programs_of_one_workload_are_independent():
    assert pids(waves([planned(pid, f"node-{pid}", workload="serving") for pid in range(3)], 1)) == [[0], [1], [2]]


def test_jobs_with_the_same_workload_are_independent():
    assert pids(waves([rank(1, "slurm/7"), rank(2, "slurm/8"), rank(3, "slurm/7")], 1)) == [[1, 3], [2]]
    assert pids(waves([rank(1, user="ada"), rank(2, user="grace")], 1)) == [[1], [2]]


def test_ranks_without_a_job_are_grouped_by_workload_user_and_number():
    ranks = [rank(1, ""), rank(2, ""), rank(3, "", ranks=2), rank(4, "", workload="other"), rank(5, "", user="ada")]
    assert pids(waves(ranks, 1)) == [[1, 2], [3], [4], [5]]


def test_first_wave_with_a_canary_is_one_job_that_would_release_memory():
    programs = [planned(1), rank(2, likely_bytes=5), planned(3, likely_bytes=5), rank(4, likely_bytes=5)]
    assert pids(waves(programs, 8, canary=True)) == [[2, 4], [1, 3]]
    assert pids(waves([planned(1), planned(2)], 8, canary=True)) == [[1], [2]]


def refused(found: list[PlannedFlush]) -> dict[int, str]:
    return {each.pid: each.refusal for each in found if each.refusal}


def test_flushes_beyond_the_limit_of_machines_are_refused_by_job():
    programs = [planned(10, "node-1"), rank(1), rank(2), rank(3), planned(11, "node-9"), planned(12, "node-1")]
    assert refused(limited(programs, Limits(max_machines=2))) == dict.fromkeys(
        (1, 2, 3), "it is beyond the limit of machines (--max-machines 2)"
    )
    assert refused(limited(programs, Limits(max_machines=4))) == {}
    assert refused(limited(programs, Limits())) == {}


def engine(pid: int, name: str = "chat", **fields: Any) -> PlannedFlush:
    return planned(pid, f"node-{pid}", engine=name, workload=name, **fields)


def test_engines_of_a_service_that_must_stay_awake_are_refused():
    engines = [engine(1), engine(2, refusal="it is busy"), engine(3), engine(4, "embed")]
    services = {"chat": Replicas(4, 3), "embed": Replicas(1, 1)}
    assert refused(limited(engines, Limits(keep=2), services)) == {
        2: "it is busy",
        3: "it is one of the last 2 replicas awake (--keep 2)",
        4: "it is the last replica awake (--keep 2)",
    }
    assert set(refused(limited(engines, Limits(keep=0), services))) == {2}
    assert refused(limited(engines, Limits(max_unavailable=parse_unavailable("50%")), services)) == {
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
    found = result_of(planned(1), 1, [receipt(outcome) for outcome in outcomes])
    assert (found.result, found.released_bytes) == (result, 5 * len(outcomes))


@pytest.mark.parametrize("fields", [{"released_bytes": "x"}, {"expected": {"low": 1}}, {"expected": 5}])
def test_receipt_of_another_form_is_refused(fields: dict[str, Any]):
    assert receipts_of({"receipts": [receipt("freed")]})[0]["released_bytes"] == 5
    with pytest.raises(DaemonError, match="incompatible version"):
        receipts_of({"receipts": [receipt("freed", **fields)]})
