"""HEAD on every GET route: the headers of GET, and no body."""

from __future__ import annotations

import httpx
import pytest

from gpumond.page.files import FILES
from gpumond.serve.examples import DEVICE
from tests.serve.guarded import GuardedApi

ROUTES = [
    path for path, methods in GuardedApi().ask("GET", "/openapi.json").json()["paths"].items() if "get" in methods
]
STREAMS = ("/api/v1/events", "/api/v1/live")
PATHS = [path.replace("{name}", "device-lost") for path in ROUTES if path not in ("/api/v1/history", *STREAMS)]
PATHS += [
    *FILES,
    "/docs",
    "/docs/runbooks/",
    "/docs/runbooks/leak",
    "/openapi.json",
    f"/api/v1/history?uuid={DEVICE.uuid}",
]


@pytest.mark.parametrize("path", PATHS)
def test_head_answers_as_get_without_the_body(path: str):
    api = GuardedApi()
    full, head = api.ask("GET", path), api.ask("HEAD", path)
    assert head.status_code == full.status_code
    assert _steady(head) == _steady(full)
    assert head.headers.get("content-length", "0") != "0"
    assert head.content == b""
    assert full.content


@pytest.mark.parametrize("path", STREAMS)
def test_head_of_a_stream_ends(path: str):
    head = GuardedApi().ask("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


def test_head_requires_a_get_route():
    answer = GuardedApi().ask("HEAD", "/api/v1/flushes")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert GuardedApi().ask("DELETE", "/api/v1/frame").headers["allow"] == "GET, HEAD"


def _steady(answer: httpx.Response) -> dict[str, str]:
    """Return the headers without those that differ between responses of /status."""
    return {name: value for name, value in answer.headers.items() if name != "content-length"}
