"""An administrator's requests to a program, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.api import examples
from gpumond.errors import NoSuchTarget, StoreUnavailable
from gpumond.model.program import AppliedLimit, Dump
from gpumond.protocol.messages import AgentResponse
from tests.api.test_app import TOKEN, View, ask

LIMIT, SNAPSHOT = "/api/v1/agents/10/limit", "/api/v1/agents/10/snapshot"


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
    assert view.agent_requests == [(10, "limit", 5, examples.UUID, "token")]
    unknown = ask(view, LIMIT, "POST", headers=TOKEN, json={"limit_bytes": 5, "device": "3"})
    assert (unknown.status_code, examples.UUID in unknown.json()["detail"]) == (404, True)
    assert ask(view, LIMIT, "POST", headers=TOKEN, json={"limit_bytes": None}).status_code == 200
    assert view.agent_requests[1] == (10, "limit", None, None, "token")


def test_snapshot_returns_its_path():
    view = view_with_response(AgentResponse("id", "", dump=Dump("torch", "/home/ada/x.pickle", 12)))
    answer = ask(view, SNAPSHOT, "POST", headers=TOKEN)
    assert (answer.status_code, answer.json()["path"]) == (200, "/home/ada/x.pickle")


@pytest.mark.parametrize(
    ("response", "status", "detail"),
    [
        (AgentResponse("id", "this program does not allow it"), 409, "does not allow"),
        (AgentResponse("id", "no", (AppliedLimit("jax", None, 5, False, "no"),)), 409, "no"),
        (AgentResponse("id", "records its history", dump=Dump(None, None, 0, "records its history")), 409, "records"),
        (None, 504, "did not answer"),
        (NoSuchTarget("no connected agent has pid 10"), 404, "pid 10"),
        (StoreUnavailable("the disk is full", full=True), 507, "nothing was changed"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(LIMIT, {"limit_bytes": 5}), (SNAPSHOT, None)])
def test_failed_command_is_a_problem_with_the_reason(
    path: str, body: object, response: AgentResponse | Exception | None, status: int, detail: str
):
    answer = ask(view_with_response(response), path, "POST", headers=TOKEN, json=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert detail in answer.json()["detail"]


@pytest.mark.parametrize("path", [LIMIT, SNAPSHOT])
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
