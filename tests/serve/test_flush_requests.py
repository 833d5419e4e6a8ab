"""Fields of a flush request: device, force, plan and timeout."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gpumond.facts.flush import FlushRequest, FlushResponse
from gpumond.facts.messages import FlushCommand, FlushResult
from gpumond.features.flush.routes import SHARED_TIMEOUT_SECONDS
from gpumond.host.peer import PeerIdentity
from gpumond.serve import examples
from gpumond.serve.limits import FLUSHES_PER_MINUTE
from tests.helpers.agents import GIB
from tests.helpers.scripted_programs import ScriptedPrograms, release_all
from tests.helpers.values import make_pool, make_report
from tests.serve.application import TOKEN, View, ask
from tests.serve.guarded import ADMIN, GuardedApi, bearer

FLUSHES = "/api/v1/flushes"


def sent_request(**body: Any) -> FlushRequest:
    view = View()
    assert ask(view, FLUSHES, "POST", headers=TOKEN, json=body).status_code == 200
    (request,) = view.flush_requests
    return request


@pytest.mark.parametrize("name", ["0", examples.UUID, examples.UUID[:8], "1b:00.0"])
def test_device_is_accepted_by_index_uuid_prefix_or_pci_address(name: str):
    assert sent_request(target={"device": name}).target.device == examples.UUID


def test_unknown_device_is_a_404_that_lists_the_devices():
    view = View()
    answer = ask(view, FLUSHES, "POST", headers=TOKEN, json={"target": {"device": "7"}})
    assert (answer.status_code, view.flush_requests) == (404, [])
    assert f"0 ({examples.UUID})" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"target": {"al": True}}, "body.target.al: unknown key; did you mean all?"),
        ({"target": {"all": True}, "dryrun": True}, "body.dryrun: unknown key; did you mean dry_run?"),
        ({"target": {"all": True}, "x": 1}, "body.x: unknown key; expected one of target, steps, "),
    ],
)
def test_unknown_key_is_named_with_the_one_that_is_meant(body: dict[str, Any], detail: str):
    answer = ask(View(), FLUSHES, "POST", headers=TOKEN, json=body)
    assert (answer.status_code, answer.json()["detail"].startswith(detail)) == (422, True), answer.json()


def test_force_and_plan_are_passed_to_the_flusher():
    request = sent_request(target={"all": True}, force=True, plan="abc")
    assert (request.force, request.plan, request.by_rule) == (True, "abc", False)
    assert not sent_request(target={"all": True}).force


@pytest.mark.parametrize(
    ("headers", "target", "seconds"),
    [
        (ADMIN, {"all": True}, 600.0),
        (bearer("gpm_flusher"), {"pid": 4242}, 600.0),
        (bearer("gpm_flusher"), {"all": True}, SHARED_TIMEOUT_SECONDS),
        (bearer("gpm_flusher"), {"device": "0"}, SHARED_TIMEOUT_SECONDS),
    ],
)
def test_long_timeouts_for_several_programs_require_admin(
    headers: dict[str, str], target: dict[str, Any], seconds: float
):
    api = GuardedApi()
    body = {"target": target, "timeout_seconds": 600}
    assert api.ask("POST", FLUSHES, headers=headers, json=body).status_code == 200
    assert api.view.flush_requests[0].timeout_seconds == seconds


OWNER, OTHER = 1001, 1002
REQUESTS = 5 * FLUSHES_PER_MINUTE


class FlushingView(View):
    """View with a real flusher for a program of one user, which records its requests."""

    def __init__(self) -> None:
        super().__init__()
        report = make_report(7, (make_pool(live=GIB, cached=2 * GIB),), uid=OWNER)
        self.scripted = ScriptedPrograms(report, respond=self.flushed)
        self.flusher = self.scripted.flusher()
        self.stalls = 0

    def flushed(self, scripted: ScriptedPrograms, identity: PeerIdentity, request: FlushCommand) -> FlushResult | None:
        self.stalls += 1
        return release_all(scripted, identity, request)

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        self.flush_requests.append(request)
        return await self.flusher.flush(request, requested_by)


def send_many(api: GuardedApi, uid: int | None, headers: dict[str, str]) -> Counter[int]:
    target = {"target": {"pid": 7}}
    return Counter(
        api.ask("POST", "/api/v1/flushes", uid, headers=headers, json=target).status_code for _ in range(REQUESTS)
    )


@pytest.mark.parametrize(
    ("uid", "headers", "first", "stalls"),
    [
        (OTHER, {}, 404, 0),
        (OWNER, {}, 200, 1),
        (None, bearer("gpm_flusher"), 200, 1),
        (None, ADMIN, 200, 1),
        (None, bearer("gpm_reader"), 403, 0),
    ],
    ids=["another user", "its owner", "a token", "an administrator", "a reader"],
)
def test_program_is_stalled_once_at_most(uid: int | None, headers: dict[str, str], first: int, stalls: int):
    api = GuardedApi(view=FlushingView())
    answers = send_many(api, uid, headers)
    flush_requests = 0 if first == 403 else FLUSHES_PER_MINUTE  # each of these is in the audit
    assert len(api.view.flush_requests) == flush_requests
    assert api.view.stalls == stalls
    assert answers[first] == (REQUESTS if first == 403 else flush_requests if first == 404 else 1)
    assert sum(answers.values()) - answers[first] == answers[429]
