"""Validation of requests: each refusal has its exact status and changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gpumond.config.web_file import WebSettings
from gpumond.page.files import FILES
from gpumond.serve.authentication import Tokens
from gpumond.serve.examples import AUDIT_ENTRY, DEVICE
from gpumond.serve.guard import Guard, Policy
from gpumond.serve.limits import CHANGES_AT_ONCE, CHANGES_PER_SECOND, MAX_BODY_BYTES, MAX_CONCURRENT_REQUESTS
from gpumond.serve.resources import ENTRIES_AT_ONCE
from gpumond.store.audit import AuditEntry
from tests.helpers import virtual_time
from tests.serve.application import AuditedStore, View, ask
from tests.serve.guarded import ADMIN, FLUSH, RULE, GuardedApi, PeerMiddleware

HOSTS = [
    ("127.0.0.1:9917", 200),
    ("127.0.0.1", 200),
    ("localhost:1", 200),
    ("LOCALHOST", 200),
    ("[::1]:9917", 200),
    ("[0:0::1]", 200),
    ("10.0.0.7:9917", 200),  # the address that the connection came to
    ("[::ffff:10.0.0.7]", 200),
    ("evil.com", 421),
    ("127.0.0.1.evil.com", 421),
    ("127.0.0.1.evil.com:9917", 421),
    ("localhost.evil.com", 421),
    ("127.0.0.2", 421),
    ("127.1", 421),
    ("2130706433", 421),
    ("10.0.0.8", 421),
    ("[::2]", 421),
    ("localhost.", 421),
    ("127.0.0.1:9917@evil.com", 400),
    ("evil.com/127.0.0.1", 400),
    ("127.0.0.1, evil.com", 400),
    ("127.0.0.1:port", 400),
    ("[::1", 400),
    ("", 400),
]


@pytest.mark.parametrize("path", ["/metrics", "/", "/api/v1/ledger", "/-/healthy", "/openapi.json", "/nothing"])
def test_host_header_must_match_exactly_on_every_route(path: str):
    api = GuardedApi()
    for host, status in HOSTS:
        answer = api.ask("GET", path, headers={"Host": host})
        assert answer.status_code == (404 if status == 200 and path == "/nothing" else status), host


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_host_of_another_name_changes_nothing(host: str, status: int):
    api = GuardedApi()
    assert api.flush({**ADMIN, "Host": host}).status_code == status
    assert api.unchanged() == (status != 200)


def test_host_header_must_be_present_once():
    api = GuardedApi()
    for headers in ([], [("host", "127.0.0.1"), ("host", "127.0.0.1")]):
        request = httpx.Request("GET", "http://127.0.0.1/metrics", headers=headers)
        request.headers = httpx.Headers(headers)

        async def send(request: httpx.Request = request) -> int:
            transport = httpx.ASGITransport(app=PeerMiddleware(api.app, None, "127.0.0.1"))
            return (await transport.handle_async_request(request)).status_code

        assert asyncio.run(send()) == 400


def test_host_of_the_configuration_is_accepted():
    api = GuardedApi(Policy(hosts=frozenset({"gpu17.example.com", "0:0:0::5"})))
    assert api.ask("GET", "/metrics", headers={"Host": "GPU17.example.com:9917"}).status_code == 200
    assert api.ask("GET", "/metrics", headers={"Host": "[::5]"}).status_code == 200
    assert api.ask("GET", "/metrics", headers={"Host": "localhost"}).status_code == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:9917", 200),  # the page of the daemon itself
        ("http://127.0.0.1", 403),
        ("http://127.0.0.1:3000", 403),
        ("https://127.0.0.1:9917", 403),
        ("http://localhost:9917", 403),
        ("http://evil.com", 403),
        ("http://127.0.0.1:9917.evil.com", 403),
        ("null", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/api/v1/flushes"), ("PUT", "/api/v1/rules/hog")])
def test_origin_of_another_page_changes_nothing(origin: str | None, status: int, method: str, path: str):
    api = GuardedApi()
    headers = ADMIN if origin is None else {**ADMIN, "Origin": origin}
    body = FLUSH if path.endswith("flushes") else RULE
    assert api.ask(method, path, headers=headers, json=body).status_code == status
    assert api.unchanged() == (status != 200)


def test_reading_sends_no_permission_to_other_origins():
    api = GuardedApi()
    answer = api.ask("GET", "/api/v1/ledger", headers={"Origin": "http://evil.com"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert api.ask("OPTIONS", "/api/v1/flushes", headers={"Origin": "http://evil.com"}).status_code == 405


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("text/plain, application/json", 415),
        ("application/json; charset=utf-16", 415),
        (None, 415),
    ],
)
def test_body_must_be_json_with_its_media_type(media_type: str | None, status: int):
    api = GuardedApi()
    headers = ADMIN if media_type is None else {**ADMIN, "Content-Type": media_type}
    content = b'{"target": {"all": true}}'
    assert api.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == status
    assert api.unchanged() == (status != 200)


def test_two_media_types_are_refused():
    api = GuardedApi()
    headers = [*ADMIN.items(), ("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    content = b'{"target": {"all": true}}'
    assert api.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == 415
    assert api.ask("POST", "/api/v1/flushes", headers=headers[::-1], content=content).status_code == 415
    assert api.unchanged()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_is_utf_8(encoding: str):
    api = GuardedApi()
    headers = {**ADMIN, "Content-Type": "application/json"}
    content = '{"target": {"all": true}}'.encode(encoding)
    assert api.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == 400
    assert api.unchanged()


def test_reserved_connections_serve_metrics_and_probes_only():
    api = GuardedApi()

    async def reserved(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["reserved"] = True
        await guard(scope, receive, send)

    guard, api.app = api.app, reserved  # type: ignore[assignment]
    assert [api.ask("GET", path).status_code for path in ("/metrics", "/-/healthy", "/-/ready")] == [200] * 3
    refused = api.ask("GET", "/api/v1/frame")
    assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
    assert refused.json()["detail"].startswith("too many connections")


def guarded_requests(handle: Callable[[str], Awaitable[object]]) -> Callable[..., Coroutine[None, None, int]]:
    """Return a function that sends a request through a guard and returns the status of the response.

    ``handle`` is awaited with the path of each request that the guard admits, before the response is sent.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await handle(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(app, Tokens("t"), Policy())

    async def request(method: str, path: str, client: str = "127.0.0.1") -> int:
        transport = httpx.ASGITransport(app=PeerMiddleware(guard, None, client))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return (await http.request(method, path)).status_code

    return request


def test_concurrent_reads_per_user_are_limited():
    """Reads of another user, and scrapes of the same user, do not wait for them."""
    admitted: list[str] = []
    release = asyncio.Event()

    async def handle(path: str) -> None:
        admitted.append(path)
        await release.wait()

    request = guarded_requests(handle)

    async def run() -> list[int]:
        many = [asyncio.create_task(request("GET", f"/{number}", f"127.0.0.{number + 1}")) for number in range(20)]
        while len(admitted) < MAX_CONCURRENT_REQUESTS:
            await asyncio.sleep(0.001)
        others = [
            asyncio.create_task(request("GET", "/other", "10.0.0.1")),
            asyncio.create_task(request("GET", "/metrics")),
        ]
        while not {"/other", "/metrics"} <= set(admitted):
            await asyncio.sleep(0.001)
        assert len(admitted) == MAX_CONCURRENT_REQUESTS + 2
        release.set()
        return list(await asyncio.gather(*many, *others))

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [200] * 22


def test_changes_of_one_user_are_rate_limited():
    """Changes of another user do not wait for them."""
    admitted: list[str] = []

    async def handle(path: str) -> None:
        admitted.append(path)

    request = guarded_requests(handle)

    async def run() -> list[int]:
        many = [request("POST", f"/{number}") for number in range(4 * CHANGES_AT_ONCE)]
        return list(await asyncio.gather(*many, request("POST", "/other", "10.0.0.1")))

    statuses, waited = virtual_time.run(run())
    assert statuses == [200] * (4 * CHANGES_AT_ONCE + 1)
    assert waited == pytest.approx(3 * CHANGES_AT_ONCE / CHANGES_PER_SECOND)
    assert admitted.index("/other") == CHANGES_AT_ONCE


@pytest.mark.parametrize("requests", [1, MAX_CONCURRENT_REQUESTS + 1])
def test_requests_are_cancelled_without_an_error_when_the_daemon_ends(requests: int):
    """uvicorn cancels those that are left, also those that wait for a slot, and would log a traceback for each."""
    ends: list[str] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    guard = PeerMiddleware(Guard(endless, Tokens("t"), Policy()), None, "127.0.0.1")

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await guard(scope, receive, send)
        except BaseException as error:
            ends.append(repr(error))
            raise
        ends.append("returned")

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://127.0.0.1") as http:
            tasks = [asyncio.create_task(http.get("/")) for _ in range(requests)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert ends == ["returned"] * requests


def test_body_limit_applies_regardless_of_content_length():
    api = GuardedApi()
    long = b'{"target": {"all": true}, "x": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {**ADMIN, "Content-Type": "application/json"}
    assert api.ask("POST", "/api/v1/flushes", headers=headers, content=long).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(long), 1000):
            yield long[start : start + 1000]

    assert api.ask("POST", "/api/v1/flushes", headers=headers, content=pieces()).status_code == 413
    assert api.unchanged()


@pytest.mark.parametrize("path", ["/metrics", "/", "/nothing", "/docs", "/api/v1/status"])
def test_security_headers_are_in_every_response(path: str):
    headers = GuardedApi().ask("GET", path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert len(headers.get_list("content-security-policy")) == 1
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    refused = GuardedApi().ask("GET", path, headers={"Host": "evil.com"})
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert refused.headers["content-type"] == "application/problem+json"


def test_headers_of_the_web_configuration_replace_the_defaults():
    web = WebSettings(headers=(("X-Frame-Options", "sameorigin"), ("Strict-Transport-Security", "max-age=5")))
    headers = GuardedApi(Policy(web=lambda: web)).ask("GET", "/").headers
    assert headers.get_list("x-frame-options") == ["sameorigin"]
    assert headers["strict-transport-security"] == "max-age=5"


def test_refusals_are_counted_by_reason():
    reasons: list[str] = []
    api = GuardedApi(Policy(count_rejection=reasons.append))
    api.ask("GET", "/metrics", headers={"Host": "evil.com"})
    api.flush({**ADMIN, "Origin": "http://evil.com"})
    assert reasons == ["host", "origin"]


def test_api_schema_has_no_command_line_and_no_environment():
    document = GuardedApi().ask("GET", "/openapi.json").text
    assert "cmdline" not in document
    assert "environ" not in document


class LongAudit(AuditedStore):
    async def audit_entries(
        self, limit: int = 0, include_users: bool = True, operation: str | None = None
    ) -> list[AuditEntry]:
        return [replace(AUDIT_ENTRY, seq=number) for number in range(limit)]


@pytest.mark.parametrize("count", [1, ENTRIES_AT_ONCE, ENTRIES_AT_ONCE + 1, 3 * ENTRIES_AT_ONCE])
def test_all_entries_of_a_long_list_are_written(count: int):
    view = View()
    view.store = LongAudit()
    answer = ask(view, f"/api/v1/audit?limit={count}")
    assert answer.headers["content-type"] == "application/json"
    assert [entry["seq"] for entry in json.loads(answer.content)] == list(range(count))


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
