"""What a request has to be, whoever asks: each refusal with its exact status, and nothing changed by any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gpumond.api.access import Policy
from gpumond.api.limits import MAX_BODY_BYTES
from gpumond.webconfig import Web
from tests.api.house import ADMIN, FLUSH, RULE, From, House

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
def test_every_route_wants_a_host_that_is_ours_exactly(path: str):
    house = House()
    for host, status in HOSTS:
        answer = house.ask("GET", path, headers={"Host": host})
        assert answer.status_code == (404 if status == 200 and path == "/nothing" else status), host


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_a_host_that_is_not_ours_changes_nothing(host: str, status: int):
    house = House()
    assert house.flush({**ADMIN, "Host": host}).status_code == status
    assert house.untouched() == (status != 200)


def test_no_host_and_two_hosts_are_refused():
    house = House()
    for headers in ([], [("host", "127.0.0.1"), ("host", "127.0.0.1")]):
        request = httpx.Request("GET", "http://127.0.0.1/metrics", headers=headers)
        request.headers = httpx.Headers(headers)

        async def send(request: httpx.Request = request) -> int:
            transport = httpx.ASGITransport(app=From(house.app, None, "127.0.0.1"))
            return (await transport.handle_async_request(request)).status_code

        assert asyncio.run(send()) == 400


def test_a_name_of_the_configuration_is_ours():
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
def test_a_page_of_another_origin_changes_nothing(origin: str | None, status: int, method: str, path: str):
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
        (None, 415),
    ],
)
def test_a_body_is_json_and_says_so(media_type: str | None, status: int):
    house = House()
    headers = ADMIN if media_type is None else {**ADMIN, "Content-Type": media_type}
    content = b'{"target": {"all": true}}'
    assert house.ask("POST", "/api/v1/flushes", headers=headers, content=content).status_code == status
    assert house.untouched() == (status != 200)


def test_a_body_is_bounded_by_what_comes_whatever_is_said_of_it():
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
def test_every_answer_forbids_browsers_what_they_need_not(path: str):
    headers = House().ask("GET", path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert len(headers.get_list("content-security-policy")) == 1
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    refused = House().ask("GET", path, headers={"Host": "evil.com"})
    assert refused.headers["x-content-type-options"] == "nosniff"
    assert refused.headers["content-type"] == "application/problem+json"


def test_headers_of_the_web_configuration_take_the_place_of_ours():
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
