"""Validation of requests: each refusal has its exact status and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gpumond.api.auth import Tokens
from gpumond.api.guard import Guard, Policy
from gpumond.api.rate_limits import CHANGES_AT_ONCE, CONCURRENT_REQUESTS, MAX_BODY_BYTES
from gpumond.config.web import Web
from tests.api.guarded import ADMIN, FLUSH, RULE, From, House

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
    house = House()
    for host, status in HOSTS:
        answer = house.ask("GET", path, headers={"Host": host})
        assert answer.status_code == (404 if status == 200 and path == "/nothing" else status), host


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_host_of_another_name_changes_nothing(host: str, status: int):
    house = House()
    assert house.flush({**ADMIN, "Host": host}).status_code == status
    assert house.untouched() == (status != 200)


def test_host_header_must_be_present_once():
    house = House()
    for headers in ([], [("host", "127.0.0.1"), ("host", "127.0.0.1")]):
        request = httpx.Request("GET", "http://127.0.0.1/metrics", headers=headers)
        request.headers = httpx.Headers(headers)

        async def send(request: httpx.Request = request) -> int:
            transport = httpx.ASGITransport(app=From(house.app, None, "127.0.0.1"))
            return (await transport.handle_async_request(request)).status_code

        assert asyncio.run(send()) == 400


def test_host_of_the_configuration_is_accepted():
    house = House(Policy(hosts=frozenset({"gpu17.example.com", "0:0:0::5"})))
    assert house.ask("GET", "/metrics", headers={"Host": "GPU17.example.com:9917"}).status_code == 200
    assert house.ask("GET", "/metrics", headers={"Host": "[::5]"}).status_code == 200
    assert house.ask("GET", "/metrics", headers={"Host": "localhost"}).status_code == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:9917", 200),  # our own page
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
    house = House()
    headers = ADMIN if origin is None else {**ADMIN, "Origin": origin}
    body = FLUSH if path.endswith("flushes") else RULE
    assert house.ask(method, path, headers=headers, json=body).status_code == status
    assert house.untouched() == (status != 200)


def test_reading_sends_no_permission_to_other_origins():
    house = House()
    answer = house.ask("GET", "/api/v1/ledger", headers={"Origin": "http://evil.com"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert house.ask("OPTIONS", "/api/v1/flushes", headers={"Origin": "http://evil.com"}).status_code == 405


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
    house = House()
    headers = ADMIN if media_type is None else {**ADMIN, "Content-Type": media_type}
    content = b'{"target": {"all": true}}'
    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == status
    assert house.untouched() == (status != 200)


def test_two_media_types_are_refused():
    house = House()
    headers = [*ADMIN.items(), ("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    content = b'{"target": {"all": true}}'
    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == 415
    assert house.ask("POST", "/api/v1/flushes", headers=headers[::-1], content=content).status_code == 415
    assert house.untouched()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_is_utf_8(encoding: str):
    house = House()
    headers = {**ADMIN, "Content-Type": "application/json"}
    content = '{"target": {"all": true}}'.encode(encoding)
    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == 400
    assert house.untouched()


def test_reserved_connections_serve_metrics_and_probes_only():
    house = House()

    async def reserved(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["reserved"] = True
        await guard(scope, receive, send)

    guard, house.app = house.app, reserved  # type: ignore[assignment]
    assert [house.ask("GET", path).status_code for path in ("/metrics", "/-/healthy", "/-/ready")] == [200] * 3
    refused = house.ask("GET", "/api/v1/frame")
    assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
    assert refused.json()["detail"].startswith("too many connections")


def test_concurrent_reads_per_user_are_limited():
    """Reads of another user, and scrapes of the same user, do not wait for them."""
    working: list[str] = []
    release = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        working.append(scope["path"])
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(slow, Tokens("t"), Policy())

    async def ask(path: str, client: str = "127.0.0.1") -> int:
        transport = httpx.ASGITransport(app=From(guard, None, client))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return (await http.get(path)).status_code

    async def run() -> list[int]:
        many = [asyncio.create_task(ask(f"/{number}", f"127.0.0.{number + 1}")) for number in range(20)]
        while len(working) < CONCURRENT_REQUESTS:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(ask("/other", "10.0.0.1")), asyncio.create_task(ask("/metrics"))]
        while not {"/other", "/metrics"} <= set(working):
            await asyncio.sleep(0.001)
        assert len(working) == CONCURRENT_REQUESTS + 2
        release.set()
        return list(await asyncio.gather(*many, *others))

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [200] * 22


def test_changes_of_one_user_begin_at_a_limited_rate():
    """Those of another user wait for none of them."""
    begun: list[str] = []

    async def record(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(record, Tokens("t"), Policy())

    async def ask(path: str, client: str = "127.0.0.1") -> int:
        transport = httpx.ASGITransport(app=From(guard, None, client))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return (await http.post(path)).status_code

    async def run() -> list[int]:
        asked = [ask(f"/{number}") for number in range(4 * CHANGES_AT_ONCE)]
        return list(await asyncio.gather(*asked, ask("/other", "10.0.0.1")))

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [200] * (4 * CHANGES_AT_ONCE + 1)
    assert begun.index("/other") < 2 * CHANGES_AT_ONCE


def test_body_limit_applies_regardless_of_content_length():
    house = House()
    long = b'{"target": {"all": true}, "x": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {**ADMIN, "Content-Type": "application/json"}
    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=long).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(long), 1000):
            yield long[start : start + 1000]

    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=pieces()).status_code == 413
    assert house.untouched()


@pytest.mark.parametrize("path", ["/metrics", "/", "/nothing", "/docs", "/api/v1/status"])
def test_security_headers_are_in_every_response(path: str):
    headers = House().ask("GET", path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert len(headers.get_list("content-security-policy")) == 1
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    refused = House().ask("GET", path, headers={"Host": "evil.com"})
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert refused.headers["content-type"] == "application/problem+json"


def test_headers_of_the_web_configuration_replace_the_defaults():
    web = Web(headers=(("X-Frame-Options", "sameorigin"), ("Strict-Transport-Security", "max-age=5")))
    headers = House(Policy(web=lambda: web)).ask("GET", "/").headers
    assert headers.get_list("x-frame-options") == ["sameorigin"]
    assert headers["strict-transport-security"] == "max-age=5"


def test_refusals_are_counted_by_reason():
    reasons: list[str] = []
    house = House(Policy(rejected=reasons.append))
    house.ask("GET", "/metrics", headers={"Host": "evil.com"})
    house.flush({**ADMIN, "Origin": "http://evil.com"})
    assert reasons == ["host", "origin"]


def test_no_command_line_and_no_environment_is_in_any_answer():
    document = House().ask("GET", "/openapi.json").text
    assert "cmdline" not in document
    assert "environ" not in document
