"""HEAD on every GET route: the headers of GET, and no body."""

from __future__ import annotations

import httpx
import pytest

from gpumond.page.files import FILES
from gpumond.serve.examples import DEVICE
from tests.serve.guarded import GuardedApi

STREAMS = ("/api/v1/events", "/api/v1/live")


def test_head_answers_as_get_without_the_body():
    documented = GuardedApi().ask("GET", "/openapi.json").json()["paths"]
    routes = [path for path, methods in documented.items() if "get" in methods]
    paths = [path.replace("{name}", "device-lost") for path in routes if path not in ("/api/v1/history", *STREAMS)]
    pages = ("/docs", "/docs/runbooks/", "/docs/runbooks/leak", "/openapi.json")
    for path in (*paths, *FILES, *pages, f"/api/v1/history?uuid={DEVICE.uuid}"):
        api = GuardedApi()
        full, head = api.ask("GET", path), api.ask("HEAD", path)
        assert head.status_code == full.status_code, path
        assert _steady(head) == _steady(full), path
        assert head.headers.get("content-length", "0") != "0", path
        assert head.content == b"", path
        assert full.content, path


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
