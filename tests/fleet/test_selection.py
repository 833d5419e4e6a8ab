"""Selection of processes on the frame of a machine, and its state."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from gpumond.facts.engines import NOT_READ, EngineProcess, EngineReading
from gpumond.facts.errors import DaemonError
from gpumond.facts.program import TICKS_PER_SECOND
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.discovery import QueriedProcess
from gpumond.features.fleet.plan import Criteria, PlannedFlush, plan_flushes
from gpumond.features.fleet.status import status_of_frame
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_report

MACHINE = Machine("node-1", "http://node-1:9917")
STARTED_AT = 500.0
"""Unix time at which the processes of the frame started."""


def frame(**fields: Any) -> dict[str, Any]:
    """train (pid 10, ada) caches 12 GiB, serve (pid 11, grace) 1 GiB; pid 12 (ada) has no agent."""
    device = make_device(
        used_bytes=60 * GIB,
        processes=(
            make_process(10, 40 * GIB, user="ada"),
            make_process(11, 10 * GIB, user="grace"),
            make_process(12, 5 * GIB, user="ada"),
        ),
    )
    reports = (
        make_report(10, (make_pool(live=20 * GIB, cached=12 * GIB),), workload="train"),
        make_report(11, (make_pool(live=5 * GIB, cached=GIB),), workload="serve", **fields),
    )
    found = make_frame(device, reports=reports)
    snapshot = found["snapshot"]
    snapshot["uptime_seconds"] = snapshot["taken_at"] - STARTED_AT + 100 / TICKS_PER_SECOND
    return found


def selected(named: dict[int, QueriedProcess] | None = None, **criteria: Any) -> dict[int, PlannedFlush]:
    return {each.pid: each for each in plan_flushes(MACHINE, frame(), Criteria(**criteria), named)}


def test_processes_match_by_workload_and_user():
    assert set(selected(workload="tr*")) == {10}
    assert set(selected(user="ada")) == {10, 12}
    assert set(selected(user="ada", workload="serve")) == set()
    assert set(selected()) == {10, 11, 12}


def test_launcher_without_memory_on_a_device_is_not_selected():
    launcher = make_report(12, (), workload="train")
    found = make_frame(make_device(), reports=(launcher,))
    assert plan_flushes(MACHINE, found, Criteria(workload="train"), None) == []


def test_plan_states_the_bytes_and_the_identity_of_the_process():
    planned = selected(workload="train")[10]
    assert (planned.low_bytes, planned.likely_bytes, planned.high_bytes) == (12 * GIB, 12 * GIB, 12 * GIB)
    assert (planned.start_ticks, planned.user, planned.refusal) == (100, "ada", "")


def test_process_without_an_agent_and_with_too_few_bytes_is_refused():
    planned = selected(min_reclaimable_bytes=2 * GIB)
    assert planned[10].refusal == ""
    assert "less than the requested minimum of 2.0 GiB" in planned[11].refusal
    assert planned[12].refusal == "the process has no agent"


def test_program_whose_agent_allows_no_flush_is_refused():
    planned = plan_flushes(MACHINE, frame(flush_policy="never"), Criteria(workload="serve"), None)
    assert [each.refusal for each in planned] == ["the program doesn't allow flushes"]


def test_only_processes_that_a_query_names_are_selected():
    planned = selected({10: QueriedProcess(10, STARTED_AT + 1, frozenset(("GPU-a",)), frozenset(("train",)))})
    assert [(pid, each.refusal) for pid, each in planned.items()] == [(10, "")]


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (QueriedProcess(10, STARTED_AT - 1), "the pid was reused"),
        (QueriedProcess(10, STARTED_AT + 1, workloads=frozenset(("serve",))), "the workload is train, not serve"),
        (QueriedProcess(10, STARTED_AT + 1, uuids=frozenset(("GPU-z",))), "the process doesn't use GPU-z"),
        (QueriedProcess(99, STARTED_AT + 1), "the process has exited"),
    ],
)
def test_another_process_than_a_query_names_is_refused(named: QueriedProcess, reason: str):
    assert reason in selected({named.pid: named})[named.pid].refusal


def test_process_whose_start_is_unknown_is_refused():
    found = frame()
    found["snapshot"]["uptime_seconds"] = None
    (planned,) = plan_flushes(MACHINE, found, Criteria(), {10: QueriedProcess(10, STARTED_AT + 1)})
    assert "the process's start time is unknown" in planned.refusal


def test_query_and_labels_both_select():
    named = {pid: QueriedProcess(pid, STARTED_AT + 1) for pid in (10, 11)}
    assert set(selected(named, workload="train")) == {10}


@pytest.mark.parametrize("answer", [None, [], {}, {"snapshot": None}, {"snapshot": {"devices": 1}}, "text"])
def test_answer_of_another_service_is_refused(answer: Any):
    with pytest.raises(DaemonError, match="the server isn't gpumond"):
        plan_flushes(MACHINE, answer, Criteria(), None)
    with pytest.raises(DaemonError, match="the server isn't gpumond"):
        status_of_frame(MACHINE, answer)


def test_state_counts_the_programs_with_an_agent():
    state = status_of_frame(MACHINE, frame())
    assert (state.programs, state.agents, state.devices, state.devices_up) == (3, 2, 1, 1)
    assert (state.used_bytes, state.reclaimable_bytes) == (60 * GIB, 13 * GIB)
    assert status_of_frame(MACHINE, frame(flush_policy="never")).reclaimable_bytes == 12 * GIB


def engine(name: str, *pids: int, **fields: Any) -> EngineReading:
    processes = tuple(EngineProcess(pid, 100) for pid in pids)
    defaults: dict[str, Any] = {"kind": "vllm", "up": True, "methods": ("sleep",), "sleeping": False}
    return EngineReading(name=name, processes=processes, **defaults | fields)


def engines(
    *given: EngineReading, named: dict[int, QueriedProcess] | None = None, **criteria: Any
) -> list[PlannedFlush]:
    found = frame()
    found["snapshot"]["engines"] = TypeAdapter(tuple[EngineReading, ...]).dump_python(given, mode="json")
    return plan_flushes(MACHINE, found, Criteria(engines_only=True, **criteria), named)


def test_engine_is_planned_once_with_the_memory_of_its_processes():
    (planned,) = engines(engine("chat", 10, 12), engine("code", 11), engine="ch*")
    assert (planned.engine, planned.workload, planned.pid, planned.refusal) == ("chat", "chat", 10, "")
    assert (planned.low_bytes, planned.high_bytes) == (0, 45 * GIB)
    assert [each.engine for each in engines(engine("chat", 10), engine("code", 11), user="grace")] == ["code"]
    assert [each.engine for each in engines(engine("chat", 10), engine("code", 11), workload="train")] == ["chat"]


def test_engine_of_a_query_is_the_one_of_its_processes():
    query = {
        10: QueriedProcess(10, STARTED_AT + 1),
        12: QueriedProcess(12, STARTED_AT + 1),
        99: QueriedProcess(99, STARTED_AT + 1),
    }
    planned = engines(engine("chat", 10), engine("code", 11), named=query)
    assert [(each.engine, each.refusal) for each in planned] == [
        ("chat", ""),
        ("", "the process belongs to no configured serving engine"),
        ("", "the process has exited"),
    ]
    (old,) = engines(engine("chat", 10), named={10: QueriedProcess(10, STARTED_AT - 1)})
    assert old.refusal.startswith("the pid was reused")


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"up": False, "problem": "timeout"}, "the engine doesn't respond: timeout"),
        ({"up": False, "problem": NOT_READ}, "the daemon hasn't read the engine yet; try again in 10 s"),
        ({"methods": ()}, "the configuration doesn't allow this; add allow: [engine]"),
        ({"sleeping": True}, "the engine is already sleeping"),
        ({"running": 2, "waiting": 1}, "the engine has 3 running or waiting requests"),
        ({"running": 0, "waiting": None}, ""),
    ],
)
def test_engine_that_cannot_be_released_is_refused(fields: dict[str, Any], refusal: str):
    (planned,) = engines(engine("chat", 10, **fields))
    assert planned.refusal == refusal


def test_engine_to_wake_needs_no_process_on_a_device():
    (planned,) = engines(engine("chat", sleeping=True, methods=()), wake=True)
    assert (planned.pid, planned.high_bytes, planned.refusal) == (0, 0, "")
    (awake,) = engines(engine("chat", 10), wake=True)
    assert awake.refusal == "the engine isn't sleeping"
    (unloaded,) = engines(engine("chat", processes_problem="its address is a proxy's"))
    assert unloaded.refusal == "its address is a proxy's"
