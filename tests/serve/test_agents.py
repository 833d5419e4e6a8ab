"""An administrator's requests to a program, without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from gpumond.facts.engines import EngineProcess
from gpumond.facts.errors import NoSuchTarget, StoreUnavailable
from gpumond.facts.messages import AgentResponse
from gpumond.facts.program import AppliedLimit, Dump
from gpumond.programs.audited_requests import SnapshotFile
from gpumond.serve import examples
from tests.helpers.agents import GIB
from tests.serve.application import FRAME, TOKEN, View, ask

LIMIT, SNAPSHOT, WHY = (f"/api/v1/agents/10/{name}" for name in ("limit", "snapshot", "why"))


def view_with_response(response: AgentResponse | Exception | None) -> View:
    class ViewWithResponse(View):
        async def ask(self, *asked: Any) -> AgentResponse | None:
            self.agent_requests.append(asked)
            if isinstance(response, Exception):
                raise response
            return response

    return ViewWithResponse()


def test_limit_returns_the_applied_limits():
    view = view_with_response(AgentResponse("id", "", (AppliedLimit("torch", "GPU-a", 5, True),)))
    answer = ask(view, LIMIT, "POST", headers=TOKEN, json={"limit_bytes": 5, "device": "0"})
    assert (answer.status_code, answer.json()[0]["applied"]) == (200, True)
    assert view.agent_requests == [(10, "limit", 5, examples.UUID, "token@loopback", None, None)]
    unknown = ask(view, LIMIT, "POST", headers=TOKEN, json={"limit_bytes": 5, "device": "3"})
    assert (unknown.status_code, examples.UUID in unknown.json()["detail"]) == (404, True)
    assert ask(view, LIMIT, "POST", headers=TOKEN, json={"limit_bytes": None}).status_code == 200
    assert view.agent_requests[1] == (10, "limit", None, None, "token@loopback", None, None)


def test_snapshot_returns_its_path():
    view = view_with_response(AgentResponse("id", "", dump=Dump("torch", "/home/research/x.pickle", 12)))
    answer = ask(view, SNAPSHOT, "POST", headers=TOKEN)
    assert (answer.status_code, answer.json()["path"]) == (200, "/home/research/x.pickle")


def test_why_returns_classes_sites_and_advice():
    response = AgentResponse("id", classes=(examples.LIVE_CLASSES,), sites=(examples.SITE,), unrecorded_bytes=7)
    view = view_with_response(response)
    answer = ask(view, WHY, "POST", headers=TOKEN, json={"record_seconds": 60.0})
    assert answer.status_code == 200
    found = answer.json()
    assert found["classes"][0]["activations_bytes"] == examples.LIVE_CLASSES.activations_bytes
    assert found["sites"][0]["calls"][0] == {"file": "/home/research/train.py", "line": 31, "function": "step"}
    assert (found["unrecorded_bytes"], found["advice"]) == (7, [])
    assert view.agent_requests == [(10, "classes", None, None, "token@loopback", None, 60.0)]


@pytest.mark.parametrize(
    ("pids", "stated", "shown"),
    [([10], GIB, GIB), ([10], None, None), ([10, 11], GIB, None), ([11], GIB, None), ([10], 9 * GIB, None)],
    ids=["engine", "unknown", "several processes", "another program", "more than its tensors"],
)
def test_kv_cache_of_an_engine_is_stated(pids: list[int], stated: int | None, shown: int | None):
    classes = replace(examples.LIVE_CLASSES, tensors_bytes=2 * GIB)
    view = view_with_response(AgentResponse("id", classes=(classes,)))
    processes = tuple(EngineProcess(pid, 1) for pid in pids)
    engine = replace(examples.ENGINE, kv_cache_bytes=stated, processes=processes)
    view.frame = replace(FRAME, snapshot=replace(FRAME.snapshot, engines=(engine,)))
    assert ask(view, WHY, "POST", headers=TOKEN).json()["kv_cache_bytes"] == shown


@pytest.mark.parametrize("seconds", [0.5, 601, "60", -1])
def test_duration_of_a_recording_is_limited(seconds: object):
    for path in (SNAPSHOT, WHY):
        view = view_with_response(None)
        assert ask(view, path, "POST", headers=TOKEN, json={"record_seconds": seconds}).status_code == 422
        assert view.agent_requests == []


class Streaming(View):
    """A view with one file of 300,000 bytes, or with a refusal."""

    CONTENT = bytes(range(256)) * 1200

    async def open_snapshot(self, pid: int, snapshot_id: int, requested_by: str, uid: int | None) -> Any:
        self.agent_requests.append((pid, snapshot_id, requested_by))
        if snapshot_id == 3:
            return None
        return SnapshotFile(len(self.CONTENT), self.parts()) if snapshot_id == 1 else AgentResponse("id", "kept are: 1")

    async def parts(self) -> AsyncGenerator[bytes, None]:
        for start in range(0, len(self.CONTENT), 100_000):
            yield self.CONTENT[start : start + 100_000]


def test_file_of_a_snapshot_is_streamed_to_an_administrator():
    view = Streaming()
    answer = ask(view, "/api/v1/agents/10/snapshots/1", headers=TOKEN)
    assert (answer.status_code, answer.content) == (200, view.CONTENT)
    assert answer.headers["content-length"] == str(len(view.CONTENT))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert view.agent_requests == [(10, 1, "token@loopback")]
    missing = ask(view, "/api/v1/agents/10/snapshots/2", headers=TOKEN)
    assert (missing.status_code, missing.json()["detail"]) == (409, "kept are: 1")
    assert ask(view, "/api/v1/agents/10/snapshots/3", headers=TOKEN).status_code == 504
    for number in ("0", "x", 2**31):
        assert ask(view, f"/api/v1/agents/10/snapshots/{number}", headers=TOKEN).status_code == 422


def test_file_of_a_snapshot_requires_the_scope_admin():
    view = Streaming()
    assert ask(view, "/api/v1/agents/10/snapshots/1").status_code == 401
    assert view.agent_requests == []


@pytest.mark.parametrize(
    ("response", "status", "detail"),
    [
        (AgentResponse("id", "this program doesn't allow it"), 409, "doesn't allow"),
        (AgentResponse("id", "no", (AppliedLimit("jax", None, 5, False, "no"),)), 409, "no"),
        (AgentResponse("id", "records its history", dump=Dump(None, None, 0, "records its history")), 409, "records"),
        (None, 504, "didn't respond"),
        (NoSuchTarget("no program with an agent has pid 10"), 404, "pid 10"),
        (StoreUnavailable("the disk is full", full=True), 507, "nothing was changed"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(LIMIT, {"limit_bytes": 5}), (SNAPSHOT, None), (WHY, None)])
def test_failed_command_is_a_problem_with_the_reason(
    path: str, body: object, response: AgentResponse | Exception | None, status: int, detail: str
):
    answer = ask(view_with_response(response), path, "POST", headers=TOKEN, json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert detail in answer.json()["detail"]


@pytest.mark.parametrize("path", [LIMIT, SNAPSHOT, WHY])
def test_commands_without_token_are_not_sent(path: str):
    view = view_with_response(None)
    assert ask(view, path, "POST", json={"limit_bytes": 5}).status_code == 401
    assert view.agent_requests == []


@pytest.mark.parametrize(
    "body", [{}, {"limit_bytes": 0}, {"limit_bytes": "5"}, {"limit_bytes": 5, "gpu": 0}, {"limit_bytes": 2**63}]
)
def test_wrong_bodies_are_refused(body: object):
    view = view_with_response(None)
    assert ask(view, LIMIT, "POST", headers=TOKEN, json=body).status_code == 422
    assert ask(view, "/api/v1/agents/0/limit", "POST", headers=TOKEN, json={"limit_bytes": 5}).status_code == 422
    assert view.agent_requests == []


def test_report_of_one_agent():
    (report,) = FRAME.snapshot.reports
    found = ask(View(), f"/api/v1/agents/{report.pid}")
    assert (found.status_code, found.json()["workload"]) == (200, report.workload)
    missing = ask(View(), "/api/v1/agents/7")
    assert (missing.status_code, missing.json()["detail"]) == (404, "no agent has pid 7")
