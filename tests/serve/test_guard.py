"""Authorization: each refusal has its exact status and changes nothing."""

from __future__ import annotations

import os
from typing import Any

import bcrypt
import pytest

from gpumond.config.tokens import Token, token_digest
from gpumond.config.web_file import WebSettings
from gpumond.features.flush.routes import HOOK_BODY_EXAMPLE as HOOK
from gpumond.page.files import PAGE
from gpumond.serve.guard import Policy
from gpumond.serve.limits import FAILED_SIGN_INS_PER_MINUTE, FLUSHES_PER_MINUTE, TokenBucket
from tests.serve.guarded import ADMIN, FLUSH, OTHERS, READERS, RULE, GuardedApi, basic, bearer

CHANGES = [
    ("POST", "/api/v1/flushes", FLUSH, "flush"),
    ("POST", "/api/v1/hooks/alertmanager", HOOK, "flush"),
    ("POST", "/api/v1/rules", RULE, "rules"),
    ("PUT", "/api/v1/rules/hog", RULE, "rules"),
    ("DELETE", "/api/v1/rules/hog", None, "rules"),
    ("POST", "/api/v1/release", {"for_seconds": 1}, "admin"),
    ("POST", "/-/reload", None, "admin"),
    ("POST", "/api/v1/agents/10/limit", {"limit_bytes": 1}, "admin"),
    ("POST", "/api/v1/agents/10/snapshot", None, "admin"),
]


@pytest.mark.parametrize(("method", "path", "body", "scope"), CHANGES)
def test_tokens_need_the_scope_of_the_change(method: str, path: str, body: Any, scope: str):
    api = GuardedApi()

    def status(**options: Any) -> int:
        options = options | ({} if body is None else {"json": body})
        return api.ask(method, path, **options).status_code

    wrong = [{}, bearer("gpm_wrong"), bearer(""), {"Authorization": "Basic Z3BtX293bjo="}, {"Authorization": "gpm_own"}]
    assert [status(headers=headers) for headers in wrong] == [401] * len(wrong)
    assert status(headers={"Cookie": "token=gpm_own"}) == 401
    assert status(params={"token": "gpm_own", "access_token": "gpm_own"}) == 401
    names = {"reader": "read", "ruler": "rules", "flusher": "flush"}
    for name, own in names.items():
        if own != scope:
            assert status(headers=bearer(f"gpm_{name}")) == 403
    assert api.unchanged()
    right = next((f"gpm_{name}" for name, own in names.items() if own == scope), "gpm_own")
    assert status(headers=bearer(right)) not in (401, 403)
    assert status(headers=ADMIN) not in (401, 403)


@pytest.mark.parametrize(("method", "path", "body", "scope"), CHANGES)
def test_unix_socket_peers_are_authorized_by_uid(method: str, path: str, body: Any, scope: str):
    options = {} if body is None else {"json": body}
    of_own_programs = scope == "flush" or path.startswith("/api/v1/agents/")
    for uid, may in ((os.geteuid(), True), (0, True), (4242, of_own_programs), (65534, False)):
        api = GuardedApi()
        status = api.ask(method, path, uid=uid, **options).status_code
        assert (status not in (401, 403)) == may, uid
        assert may or api.unchanged()


def test_flushes_of_other_users_are_limited_to_their_programs():
    api = GuardedApi()
    assert api.flush({}, uid=4242).status_code == 200
    assert api.flush(ADMIN).status_code == 200
    assert api.flush(bearer("gpm_flusher"), uid=4242).status_code == 200
    assert [request.target.uid for request in api.view.flush_requests] == [4242, None, None]


def test_wrong_token_is_refused_on_the_unix_socket():
    api = GuardedApi()
    assert api.flush(bearer("gpm_wrong"), uid=os.geteuid()).status_code == 401


def test_empty_token_is_refused_whatever_the_file_contains():
    api = GuardedApi(file_tokens=[Token("nothing", frozenset({"admin"}), token_digest(""))])
    for headers in (bearer(""), {"Authorization": "Bearer"}, {"Authorization": "bearer  "}):
        assert api.flush(headers).status_code == 401
        assert api.flush(headers, uid=os.geteuid()).status_code == 401
    assert api.unchanged()


def test_revoked_token_is_refused():
    others = list(OTHERS)
    api = GuardedApi(file_tokens=others)
    assert api.flush(bearer("gpm_flusher")).status_code == 200
    others.clear()
    assert api.flush(bearer("gpm_flusher")).status_code == 401


def test_wrong_tokens_are_rate_limited_by_address_and_valid_ones_never():
    api = GuardedApi()
    statuses = [api.flush(bearer(f"gpm_{n}")).status_code for n in range(FAILED_SIGN_INS_PER_MINUTE + 3)]
    assert statuses == [401] * FAILED_SIGN_INS_PER_MINUTE + [429] * 3
    assert int(api.flush(bearer("gpm_x")).headers["retry-after"]) >= 1
    assert api.flush(bearer("gpm_x"), client="10.0.0.9").status_code == 401
    assert api.flush(ADMIN).status_code == 200


def test_guesses_from_all_loopback_addresses_are_counted_together():
    api = GuardedApi(Policy(web=lambda: WebSettings(users=READERS)))
    addresses = [f"127.0.{n}.1" for n in range(FAILED_SIGN_INS_PER_MINUTE)] + ["::1", "127.9.9.9"]
    guesses = [api.ask("GET", "/metrics", client=client, headers=basic("prometheus", client)) for client in addresses]
    assert [guess.status_code for guess in guesses] == [401] * FAILED_SIGN_INS_PER_MINUTE + [429] * 2
    assert api.ask("GET", "/metrics", client="10.0.0.9", headers=basic("prometheus", "x")).status_code == 401


def test_flushes_of_one_caller_are_bounded_and_plans_are_not():
    api = GuardedApi()
    flusher = bearer("gpm_flusher")
    statuses = [api.flush(flusher).status_code for _ in range(FLUSHES_PER_MINUTE + 20)]
    assert statuses == [200] * FLUSHES_PER_MINUTE + [429] * 20
    assert len(api.view.flush_requests) == FLUSHES_PER_MINUTE
    plan = api.ask("POST", "/api/v1/flushes", headers=flusher, json={**FLUSH, "dry_run": True})
    assert plan.status_code == 200
    assert api.flush({}, uid=4242).status_code == 200  # another caller


def test_reads_are_open_on_loopback_and_require_a_token_elsewhere():
    closed = GuardedApi(Policy(open_reads=False))
    paths = ("/metrics", "/api/v1/frame", "/api/v1/ledger", "/api/v1/events", "/openapi.json", "/docs", "/nothing")
    for path in paths:
        assert closed.ask("GET", path).status_code == 401
        assert closed.ask("GET", path, headers=bearer("gpm_wrong"), client=path).status_code == 401
    for headers in (ADMIN, bearer("gpm_reader"), bearer("gpm_flusher")):
        assert closed.ask("GET", "/api/v1/ledger", headers=headers).status_code == 200
    assert closed.ask("GET", "/api/v1/ledger", uid=4242).status_code == 200
    assert closed.ask("GET", "/-/healthy").status_code == 200
    assert closed.ask("GET", "/-/ready").status_code == 200
    assert closed.ask("GET", "/api/v1/ledger", headers=basic("prometheus", "wonder")).status_code == 401
    assert GuardedApi().ask("GET", "/api/v1/ledger").status_code == 200


def test_page_requires_no_token_unless_users_are_configured():
    closed, named = (
        GuardedApi(Policy(open_reads=False)),
        GuardedApi(Policy(open_reads=False, web=lambda: WebSettings(users=READERS))),
    )
    for path in PAGE:
        assert closed.ask("GET", path).status_code == 200
        assert named.ask("GET", path).status_code == 401


def test_client_certificate_opens_reads():
    api = GuardedApi(Policy(open_reads=False, web=lambda: WebSettings(requires_certificate=True)))
    assert api.ask("GET", "/metrics").status_code == 200
    assert api.flush({}).status_code == 401


def test_users_of_the_web_configuration_may_only_read():
    api = GuardedApi(Policy(web=lambda: WebSettings(users=READERS)))
    refused = api.ask("GET", "/metrics")
    assert (refused.status_code, refused.headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")
    wrong = [
        ("prometheus", "wrong"),
        ("grafana", "wonder"),
        ("", ""),
        ("prometheus", ""),
        ("prometheus", "wonder\0"),
        ("prometheus", "w" * 99),
    ]
    for user, password in wrong:
        assert api.ask("GET", "/metrics", headers=basic(user, password), client=user + password[:3]).status_code == 401
    assert api.ask("GET", "/metrics", headers={"Authorization": "Basic !!!"}).status_code == 401
    for _ in range(2):  # checked, then remembered
        assert api.ask("GET", "/metrics", headers=basic("prometheus", "wonder")).status_code == 200
    assert api.ask("GET", "/metrics", headers=bearer("gpm_reader")).status_code == 200
    assert api.flush(basic("prometheus", "wonder")).status_code == 401
    assert api.unchanged()
    assert api.flush(ADMIN).status_code == 200


def test_wrong_passwords_are_rate_limited_and_cached_ones_are_not():
    api = GuardedApi(Policy(web=lambda: WebSettings(users=READERS)))
    assert api.ask("GET", "/metrics", headers=basic("prometheus", "wonder")).status_code == 200
    statuses = [api.ask("GET", "/metrics", headers=basic("prometheus", f"{n}")).status_code for n in range(12)]
    assert statuses == [401] * FAILED_SIGN_INS_PER_MINUTE + [429] * 2
    assert api.ask("GET", "/metrics", headers=basic("prometheus", "wonder")).status_code == 200


def test_changed_password_is_refused():
    users = dict(READERS)
    api = GuardedApi(Policy(web=lambda: WebSettings(users=users)))
    assert api.ask("GET", "/metrics", headers=basic("prometheus", "wonder")).status_code == 200
    users["prometheus"] = bcrypt.hashpw(b"glass", bcrypt.gensalt(4))
    assert api.ask("GET", "/metrics", headers=basic("prometheus", "wonder")).status_code == 401
    assert api.ask("GET", "/metrics", headers=basic("prometheus", "glass")).status_code == 200


def test_rate_limit_refills_and_drops_the_oldest_users():
    rate = TokenBucket(2, 60.0, max_keys=2)
    for _ in range(2):
        assert rate.wait_seconds("a", 0.0) == 0
        rate.spend("a", 0.0)
    assert rate.wait_seconds("a", 0.0) == pytest.approx(30.0)
    assert rate.wait_seconds("a", 15.0) == pytest.approx(15.0)
    assert rate.wait_seconds("a", 30.0) == pytest.approx(0.0)
    assert rate.wait_seconds("b", 0.0) == 0
    for key in ("b", "c"):
        rate.spend(key, 0.0)
    assert rate.wait_seconds("a", 0.0) == 0
