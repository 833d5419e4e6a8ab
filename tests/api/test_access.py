"""Who may ask for what: the table of refusals, each with its exact status, and nothing changed by any."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import bcrypt
import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumond.api.access import Guard, Policy
from gpumond.api.app import create_app
from gpumond.api.auth import Tokens
from gpumond.api.limits import FAILURES_PER_MINUTE, FLUSHES_PER_MINUTE, MAX_BODY_BYTES, Rate
from gpumond.tokens import Token, digest
from gpumond.webconfig import Web
from tests.api.test_app import View, nothing

ADMIN = {"Authorization": "Bearer gpm_own"}
FLUSH = {"target": {"all": True}}
RULE = {"name": "hog", "scope": "process", "value": "used_bytes", "above": "40GiB"}
ALICE = {"alice": bcrypt.hashpw(b"wonder", bcrypt.gensalt(4))}
OTHERS = [
    Token("reader", frozenset({"read"}), digest("gpm_reader")),
    Token("ruler", frozenset({"rules"}), digest("gpm_ruler")),
    Token("flusher", frozenset({"flush"}), digest("gpm_flusher")),
]


class From:
    """What a server would say of the connection: the peer's address and, of a Unix socket, its user."""

    def __init__(self, app: ASGIApp, uid: int | None, client: str) -> None:
        self.app, self.uid, self.client = app, uid, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"uid": self.uid}
        scope["server"], scope["client"] = ("10.0.0.7", 9917), (self.client, 50000)
        await self.app(scope, receive, send)


class House:
    """The API behind its guard, over a view made of values."""

    def __init__(self, policy: Policy = Policy(), others: Sequence[Token] = OTHERS, view: View | None = None) -> None:
        self.view: Any = view or View()
        self.tokens = Tokens("gpm_own", others=lambda: others, clock=lambda: 0.0)
        self.app = Guard(create_app(self.view, self.tokens, nothing), self.tokens, policy)

    def ask(
        self, method: str, path: str, uid: int | None = None, client: str = "127.0.0.1", **options: Any
    ) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=From(self.app, uid, client), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as http:
                return await http.request(method, path, **options)

        return asyncio.run(run())

    def flush(self, headers: Mapping[str, str] = ADMIN, uid: int | None = None, **options: Any) -> httpx.Response:
        return self.ask("POST", "/api/v1/flushes", uid, headers=headers, json=FLUSH, **options)

    def untouched(self) -> bool:
        return not self.view.asked and not self.view.asks and not self.view.store.kept


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


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


CHANGES = [
    ("POST", "/api/v1/flushes", FLUSH, "flush"),
    ("POST", "/api/v1/rules", RULE, "rules"),
    ("PUT", "/api/v1/rules/hog", RULE, "rules"),
    ("DELETE", "/api/v1/rules/hog", None, "rules"),
    ("POST", "/api/v1/release", {"for_seconds": 1}, "admin"),
    ("POST", "/-/reload", None, "admin"),
    ("POST", "/api/v1/agents/10/limit", {"limit_bytes": 1}, "admin"),
    ("POST", "/api/v1/agents/10/snapshot", None, "admin"),
]


@pytest.mark.parametrize(("method", "path", "body", "scope"), CHANGES)
def test_what_changes_something_wants_a_token_with_its_scope(method: str, path: str, body: Any, scope: str):
    house = House()

    def status(**options: Any) -> int:
        options = options | ({} if body is None else {"json": body})
        return house.ask(method, path, **options).status_code

    wrong = [{}, bearer("gpm_wrong"), bearer(""), {"Authorization": "Basic Z3BtX293bjo="}, {"Authorization": "gpm_own"}]
    assert [status(headers=headers) for headers in wrong] == [401] * len(wrong)
    assert status(headers={"Cookie": "token=gpm_own"}) == 401
    assert status(params={"token": "gpm_own", "access_token": "gpm_own"}) == 401
    names = {"reader": "read", "ruler": "rules", "flusher": "flush"}
    for name, own in names.items():
        if own != scope:
            assert status(headers=bearer(f"gpm_{name}")) == 403
    assert house.untouched()
    right = next((f"gpm_{name}" for name, own in names.items() if own == scope), "gpm_own")
    assert status(headers=bearer(right)) not in (401, 403)
    assert status(headers=ADMIN) not in (401, 403)


@pytest.mark.parametrize(("method", "path", "body", "scope"), CHANGES)
def test_over_the_unix_socket_the_kernel_says_who_asks(method: str, path: str, body: Any, scope: str):
    options = {} if body is None else {"json": body}
    for uid, may in ((os.geteuid(), True), (0, True), (4242, scope == "flush"), (65534, False)):
        house = House()
        status = house.ask(method, path, uid=uid, **options).status_code
        assert (status not in (401, 403)) == may, uid
        assert may or house.untouched()


def test_another_user_flushes_his_own_programs_alone():
    house = House()
    assert house.flush({}, uid=4242).status_code == 200
    assert house.flush(ADMIN).status_code == 200
    assert house.flush(bearer("gpm_flusher"), uid=4242).status_code == 200
    assert [request.target.uid for request in house.view.asked] == [4242, None, None]


def test_a_wrong_token_is_not_made_good_by_the_unix_socket():
    house = House()
    assert house.flush(bearer("gpm_wrong"), uid=os.geteuid()).status_code == 401


def test_a_token_that_was_taken_back_holds_no_longer():
    others = list(OTHERS)
    house = House(others=others)
    assert house.flush(bearer("gpm_flusher")).status_code == 200
    others.clear()
    assert house.flush(bearer("gpm_flusher")).status_code == 401


def test_wrong_tokens_are_slowed_down_by_address_and_right_ones_never():
    house = House()
    statuses = [house.flush(bearer(f"gpm_{n}")).status_code for n in range(FAILURES_PER_MINUTE + 3)]
    assert statuses == [401] * FAILURES_PER_MINUTE + [429] * 3
    assert int(house.flush(bearer("gpm_x")).headers["retry-after"]) >= 1
    assert house.flush(bearer("gpm_x"), client="10.0.0.9").status_code == 401
    assert house.flush(ADMIN).status_code == 200


def test_flushes_of_one_caller_are_bounded_and_plans_are_not():
    house = House()
    flusher = bearer("gpm_flusher")
    statuses = [house.flush(flusher).status_code for _ in range(FLUSHES_PER_MINUTE + 20)]
    assert statuses == [200] * FLUSHES_PER_MINUTE + [429] * 20
    assert len(house.view.asked) == FLUSHES_PER_MINUTE
    plan = house.ask("POST", "/api/v1/flushes", headers=flusher, json={**FLUSH, "dry_run": True})
    assert plan.status_code == 200
    assert house.flush({}, uid=4242).status_code == 200  # another caller


def test_reads_are_open_on_loopback_and_want_a_token_elsewhere():
    closed = House(Policy(open_reads=False))
    paths = ("/metrics", "/api/v1/frame", "/api/v1/ledger", "/api/v1/events", "/openapi.json", "/docs", "/nothing")
    for path in paths:
        assert closed.ask("GET", path).status_code == 401
        assert closed.ask("GET", path, headers=bearer("gpm_wrong"), client=path).status_code == 401
    for headers in (ADMIN, bearer("gpm_reader"), bearer("gpm_flusher")):
        assert closed.ask("GET", "/api/v1/ledger", headers=headers).status_code == 200
    assert closed.ask("GET", "/api/v1/ledger", uid=4242).status_code == 200
    assert closed.ask("GET", "/-/healthy").status_code == 200
    assert closed.ask("GET", "/-/ready").status_code == 200
    assert closed.ask("GET", "/api/v1/ledger", headers=basic("alice", "wonder")).status_code == 401
    assert House().ask("GET", "/api/v1/ledger").status_code == 200


def test_the_page_is_open_for_people_to_sign_in_on_unless_users_are_named():
    closed, named = House(Policy(open_reads=False)), House(Policy(open_reads=False, web=lambda: Web(users=ALICE)))
    for path in ("/", "/page.css", "/page.js"):
        assert closed.ask("GET", path).status_code == 200
        assert named.ask("GET", path).status_code == 401


def test_a_client_certificate_opens_reads():
    house = House(Policy(open_reads=False, web=lambda: Web(mutual=True)))
    assert house.ask("GET", "/metrics").status_code == 200
    assert house.flush({}).status_code == 401


def test_users_of_the_web_configuration_may_read_and_no_more():
    house = House(Policy(web=lambda: Web(users=ALICE)))
    refused = house.ask("GET", "/metrics")
    assert (refused.status_code, refused.headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")
    wrong = [("alice", "wrong"), ("bob", "wonder"), ("", ""), ("alice", ""), ("alice", "wonder\0"), ("alice", "w" * 99)]
    for user, password in wrong:
        assert (
            house.ask("GET", "/metrics", headers=basic(user, password), client=user + password[:3]).status_code == 401
        )
    assert house.ask("GET", "/metrics", headers={"Authorization": "Basic !!!"}).status_code == 401
    for _ in range(2):  # checked, then remembered
        assert house.ask("GET", "/metrics", headers=basic("alice", "wonder")).status_code == 200
    assert house.ask("GET", "/metrics", headers=bearer("gpm_reader")).status_code == 200
    assert house.flush(basic("alice", "wonder")).status_code == 401
    assert house.untouched()
    assert house.flush(ADMIN).status_code == 200


def test_wrong_passwords_are_slowed_down_and_a_remembered_one_is_not():
    house = House(Policy(web=lambda: Web(users=ALICE)))
    assert house.ask("GET", "/metrics", headers=basic("alice", "wonder")).status_code == 200
    statuses = [house.ask("GET", "/metrics", headers=basic("alice", f"{n}")).status_code for n in range(12)]
    assert statuses == [401] * FAILURES_PER_MINUTE + [429] * 2
    assert house.ask("GET", "/metrics", headers=basic("alice", "wonder")).status_code == 200


def test_a_password_that_was_changed_holds_no_longer():
    users = dict(ALICE)
    house = House(Policy(web=lambda: Web(users=users)))
    assert house.ask("GET", "/metrics", headers=basic("alice", "wonder")).status_code == 200
    users["alice"] = bcrypt.hashpw(b"glass", bcrypt.gensalt(4))
    assert house.ask("GET", "/metrics", headers=basic("alice", "wonder")).status_code == 401
    assert house.ask("GET", "/metrics", headers=basic("alice", "glass")).status_code == 200


def test_the_web_configurations_rate_holds_for_all_requests():
    house = House(Policy(web=lambda: Web(rate_interval=60.0, rate_burst=3)))
    assert [house.ask("GET", "/metrics").status_code for _ in range(5)] == [200, 200, 200, 429, 429]


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


def test_a_rate_fills_again_and_forgets_the_oldest():
    rate = Rate(2, 60.0, keys=2)
    for _ in range(2):
        assert rate.wait("a", 0.0) == 0
        rate.count("a", 0.0)
    assert rate.wait("a", 0.0) == pytest.approx(30.0)
    assert rate.wait("a", 15.0) == pytest.approx(15.0)
    assert rate.wait("a", 30.0) == pytest.approx(0.0)
    assert rate.wait("b", 0.0) == 0
    for key in ("b", "c"):
        rate.count(key, 0.0)
    assert rate.wait("a", 0.0) == 0
