"""The application of the daemon imports FastAPI and the routes when one of them is first requested."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from gpumond.metrics.exposition import Page
from gpumond.page.files import FILES
from gpumond.serve.auth import Tokens
from gpumond.serve.deferred import DeferredApi
from tests.serve.application import View, ask as complete, no_lifespan

MONITORED = (
    "/-/healthy",
    "/healthz",
    "/-/ready",
    "/readyz",
    "/metrics",
    "/metrics?compat=dcgm",
    "/metrics?compat=dcgm-4.7",
    "/metrics?collect[]=device",
    "/metrics?collect%5B%5D=process&collect[]=daemon&collect[]=daemon",
    "/metrics?compat=dcgm&collect[]=process",
)
OTHERS = (
    "/metrics?compat=none",
    "/metrics?compat=dcgm&compat=dcgm-4.7",
    "/metrics?collect[]=gpu",
    "/metrics?collect[]=",
    "/metrics?other=1",
    "/api/v1/status",
    "/docs",
    "/absent",
    "/metrics/",
)


def ask(app: ASGIApp, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


def deferred(view: View) -> DeferredApi:
    return DeferredApi(view, Tokens("secret"), no_lifespan)


@cache
def with_routes(frame: bool) -> DeferredApi:
    """One application that has imported the routes, because they take long to make."""
    return deferred(View() if frame else View(frame=None))


def has_imported_routes(app: DeferredApi) -> bool:
    return app._api is not None


@pytest.mark.parametrize("frame", [True, False])
@pytest.mark.parametrize("path", [*MONITORED, *FILES, *OTHERS])
def test_answers_are_those_of_the_complete_application(path: str, frame: bool):
    for method in ("GET", "POST"):
        view = View() if frame else View(frame=None)
        app = deferred(view) if method == "GET" else with_routes(frame)
        for headers in ({}, {"Accept-Encoding": "gzip", "Accept": "application/openmetrics-text"}):
            found: list[Any] = []
            for answer in (
                complete(view, path, method, headers=headers),
                ask(app, path, method, headers),
            ):
                body = b"" if path == "/api/v1/status" else answer.content  # it contains the time
                found.append((answer.status_code, sorted(answer.headers.multi_items()), body))
            found = [each if path != "/api/v1/status" else each[0] for each in found]
            assert found[0] == found[1]
            assert has_imported_routes(app) == (path in OTHERS or method == "POST")


@pytest.mark.parametrize("path", FILES)
def test_file_of_the_page_that_has_not_changed_is_not_sent_again(path: str):
    app = deferred(View())
    headers = {"If-None-Match": ask(app, path).headers["etag"]}
    again = ask(app, path, headers=headers)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers == complete(View(), path, headers=headers).headers
    assert not has_imported_routes(app)


def test_stream_before_the_first_frame_is_refused_without_the_routes():
    early = View(frame=None)
    app = deferred(early)
    answers = ask(app, "/api/v1/live"), complete(early, "/api/v1/live")
    assert not has_imported_routes(app)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert (answers[0].headers, answers[0].content) == (answers[1].headers, answers[1].content)


VISIT = """
import asyncio, sys
from types import SimpleNamespace

from gpumond.serve.auth import Tokens
from gpumond.serve.deferred import DeferredApi
from gpumond.event_log import EventLog
from gpumond.serve.guard import Guard, Policy
from gpumond.facts.frame import Frame, Ledger
from gpumond.testing import make_snapshot

view = SimpleNamespace(frame=Frame(make_snapshot(), Ledger()), events=EventLog(1.0), await_frame=asyncio.sleep)

async def get(path, last):
    received, found = bytearray(), asyncio.Event()
    async def receive():
        await found.wait()
        return {"type": "http.disconnect"}
    async def send(message):
        received.extend(message.get("body", b""))
        if last in received:
            found.set()
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}
    await asyncio.wait_for(app({**scope, "client": ("127.0.0.1", 5)}, receive, send), 60)
    assert last in received

async def visit():
    await get("/", b"</html>")
    await get("/api/v1/live", b"event: frame")

tokens = Tokens("secret")
app = Guard(DeferredApi(view, tokens, None), tokens, Policy())
asyncio.run(visit())
print(*sys.modules)
"""


def test_page_and_its_stream_need_no_fastapi():
    done = subprocess.run([sys.executable, "-c", VISIT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"fastapi", "starlette.routing", "gpumond.serve.app", "gpumond.serve.problems"} & set(
        done.stdout.split()
    )


def test_metrics_that_cannot_be_written_are_a_problem_document():
    class Broken(View):
        async def metrics(self, *asked: Any) -> Page:
            raise RuntimeError("broken")

    answer = ask(deferred(Broken()), "/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert answer.json() == complete(Broken(), "/metrics").json()


def test_concurrent_first_requests_are_answered():
    app = deferred(View())

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as client:
            answers = await asyncio.gather(*(client.get("/api/v1/status") for _ in range(4)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [200] * 4


@pytest.mark.parametrize("failure", ["", "startup", "shutdown"])
def test_lifespan_of_the_daemon_is_reported_to_the_server(failure: str):
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        if failure == "startup":
            raise OSError("no disk")
        yield
        if failure == "shutdown":
            raise OSError("no disk")

    sent: list[Message] = []

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        await DeferredApi(View(), Tokens("secret"), lifespan)({"type": "lifespan"}, receive, send)

    if failure:
        with pytest.raises(OSError, match="no disk"):
            asyncio.run(run())
        assert "no disk" in sent[-1]["message"]
    else:
        asyncio.run(run())
    names = {"": ["startup.complete", "shutdown.complete"], "startup": ["startup.failed"]}
    expected = names.get(failure, ["startup.complete", "shutdown.failed"])
    assert [message["type"].removeprefix("lifespan.") for message in sent] == expected


def test_start_of_the_daemon_imports_neither_fastapi_nor_yaml():
    program = "import sys, gpumond.commands.serve, gpumond.daemon.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not {"fastapi", "starlette.routing", "anyio", "yaml", "gpumond.serve.app"} & set(done.stdout.split())
