"""Waves of flushes, and the result for a process from its receipts."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.errors import DaemonError
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.flush import PlannedFlush, result_of, waves
from gpumond.view.frame import receipts_of
from tests.helpers.stubs import receipt


def planned(pid: int, workload: str = "", machine: str = "a", user: str = "ada") -> PlannedFlush:
    own = Machine(machine, f"http://{machine}:9917")
    return PlannedFlush(machine=own, pid=pid, start_ticks=1, workload=workload, user=user)


def pids(found: list[list[PlannedFlush]]) -> list[list[int]]:
    return [[each.pid for each in wave] for wave in found]


def test_ranks_of_a_workload_are_in_one_wave():
    ranks = [planned(pid, "job", f"node-{pid}") for pid in range(6)]
    others = [planned(10, "x"), planned(11, "y")]
    assert pids(waves([*ranks[:3], *others, *ranks[3:]], 4)) == [[0, 1, 2, 3, 4, 5], [10, 11]]


def test_wave_has_at_most_the_number_of_processes():
    assert pids(waves([planned(pid) for pid in range(5)], 2)) == [[0, 1], [2, 3], [4]]
    assert waves([], 2) == []


def test_workloads_of_two_users_are_independent():
    assert pids(waves([planned(1, "train", user="ada"), planned(2, "train", user="grace")], 1)) == [[1], [2]]


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
