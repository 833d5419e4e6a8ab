"""Fields of a flush request: device, force, plan and timeout."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.flush import FlushRequest
from gpumond.features.flush.routes import MANY_SECONDS
from gpumond.serve import examples
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
    assert f"0 {examples.UUID}" in answer.json()["detail"]


def test_force_and_plan_are_passed_to_the_flusher():
    request = sent_request(target={"all": True}, force=True, plan="abc")
    assert (request.force, request.plan, request.by_rule) == (True, "abc", False)
    assert not sent_request(target={"all": True}).force


@pytest.mark.parametrize(
    ("headers", "target", "seconds"),
    [
        (ADMIN, {"all": True}, 600.0),
        (bearer("gpm_flusher"), {"pid": 4242}, 600.0),
        (bearer("gpm_flusher"), {"all": True}, MANY_SECONDS),
        (bearer("gpm_flusher"), {"device": "0"}, MANY_SECONDS),
    ],
)
def test_long_timeouts_for_several_programs_require_admin(
    headers: dict[str, str], target: dict[str, Any], seconds: float
):
    api = GuardedApi()
    body = {"target": target, "timeout_seconds": 600}
    assert api.ask("POST", FLUSHES, headers=headers, json=body).status_code == 200
    assert api.view.flush_requests[0].timeout_seconds == seconds
