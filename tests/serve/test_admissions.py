"""HTTP API of requests for device memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gpumond.facts.frame import Frame
from gpumond.facts.snapshot import STARTING, DeviceReading
from gpumond.serve.examples import DEVICE, SNAPSHOT
from tests.serve.application import FRAME, TOKEN, View, ask

PATH = "/api/v1/admissions"
UNKNOWN = "0" * 32


def frame(*devices: DeviceReading) -> Frame:
    """Return a frame with these devices; without any, of a daemon whose source has not answered yet."""
    source = SNAPSHOT.source if devices else replace(SNAPSHOT.source, up=False, reason=STARTING)
    return replace(FRAME, snapshot=replace(SNAPSHOT, devices=devices, source=source))


def request(view: View, **body: Any) -> httpx.Response:
    return ask(view, PATH, "POST", headers=TOKEN, json={"need_bytes": 1} | body)


def test_change_is_stored_before_it_is_answered():
    view = View()
    asyncio.run(view.admissions.load())
    granted = request(view).json()
    assert (granted["state"], view.store.names("admissions")) == ("granted", [granted["id"]])
    assert ask(view, f"{PATH}/{granted['id']}", "PUT", headers=TOKEN).json() == granted
    assert ask(view, f"{PATH}/{granted['id']}", "DELETE", headers=TOKEN).status_code == 204
    assert view.store.names("admissions") == []


@pytest.mark.parametrize("before", [None, frame()])
def test_request_before_the_first_reading_is_tried_again_later(before: Frame | None):
    view = View(before)
    answer = request(view)
    assert (answer.status_code, "first reading" in answer.json()["detail"]) == (503, True)
    assert ask(view, f"{PATH}/{UNKNOWN}", "PUT", headers=TOKEN).status_code == 404


@pytest.mark.parametrize(
    ("devices", "body", "status", "detail"),
    [
        ((DEVICE,), {"need_bytes": 2**60}, 409, "but GPU 0 can provide at most 79.0 GiB (the driver"),
        (
            (replace(DEVICE, reserved_bytes=DEVICE.size_bytes // 2),),
            {"need_bytes": DEVICE.size_bytes},
            409,
            "but GPU 0 can provide at most 40.0 GiB (the driver reserves 40.0 GiB)",
        ),
        ((DEVICE,), {"device": "7"}, 404, "no GPU '7'"),
        ((DEVICE, replace(DEVICE, uuid="GPU-b", index=1)), {}, 422, "this machine has 2 GPUs; choose one"),
        ((DEVICE,), {"need_bytes": 0}, 422, "need_bytes"),
        ((DEVICE,), {"pid": "1"}, 422, "pid"),
    ],
)
def test_refusal_states_what_is_expected(
    devices: tuple[DeviceReading, ...], body: dict[str, Any], status: int, detail: str
):
    answer = request(View(frame(*devices)), **body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


def test_requests_without_a_token_are_refused():
    view = View()
    assert ask(view, PATH, "POST", json={"need_bytes": 1}).status_code == 401
    for method in ("PUT", "DELETE"):
        assert ask(view, f"{PATH}/{UNKNOWN}", method).status_code == 401
