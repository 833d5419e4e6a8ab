"""Sign-in of a browser with a one-time code: rights, limits and ends."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpumond.config.tokens import Token, token_digest
from gpumond.host.peer import rate_limit_name
from gpumond.serve.authentication import (
    MAX_SIGN_INS,
    MAX_SIGN_INS_PER_CALLER,
    SESSION_SECONDS,
    SIGN_IN_CODE_SECONDS,
    Caller,
    SignIns,
)
from gpumond.serve.guard import Policy
from gpumond.store.audit import is_user
from tests.serve.guarded import ADMIN, FLUSH, OTHERS, RULE, GuardedApi

CLOSED = Policy(open_reads=False)


def bearer(token: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {token}"}}


def code_of(api: GuardedApi, **options: Any) -> str:
    answer = api.ask("POST", "/api/v1/sessions/code", json={}, **options)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["code"])


def sign_in(api: GuardedApi, code: str) -> Any:
    return api.ask("POST", "/api/v1/sessions", json={"code": code})


def session(api: GuardedApi, **options: Any) -> dict[str, Any]:
    return bearer(sign_in(api, code_of(api, **options)).json()["token"])


def test_session_has_the_rights_of_the_caller():
    api = GuardedApi(CLOSED)
    admin = session(api, headers=ADMIN)
    assert api.ask("GET", "/api/v1/status", **admin).status_code == 200
    assert api.ask("POST", "/api/v1/rules/preview", json=RULE, **admin).status_code == 200
    reader = session(api, **bearer("gpm_reader"))
    assert api.ask("GET", "/api/v1/status", **reader).status_code == 200
    assert api.ask("POST", "/api/v1/flushes", json=FLUSH, **reader).status_code == 403


def test_session_of_a_unix_user_flushes_only_programs_of_that_user():
    api = GuardedApi()
    assert api.ask("POST", "/api/v1/flushes", json=FLUSH, **session(api, uid=1234)).status_code == 200
    (request,) = api.view.flush_requests
    assert request.target.uid == 1234


def test_receipts_tell_tokens_addresses_and_sessions_apart():
    """The names of requests over the socket, with a token, and of two browsers that the same user has signed in."""
    api = GuardedApi()
    for options in ({"uid": 0}, {"headers": ADMIN}, session(api, uid=1234), session(api, uid=1234)):
        assert api.ask("POST", "/api/v1/flushes", json=FLUSH, **options).status_code == 200
    socket, token, first, second = api.view.requested_by
    assert (socket, token) == ("uid:0", "token@loopback")
    assert re.fullmatch("uid:1234/session:[0-9a-f]{8}@loopback", first)
    assert first != second
    assert {rate_limit_name(first), rate_limit_name(second)} == {"uid:1234"}
    assert [is_user(name) for name in (socket, token, first)] == [False, False, True]


def test_code_is_valid_once():
    api = GuardedApi(CLOSED)
    code = code_of(api, headers=ADMIN)
    assert sign_in(api, code).status_code == 200
    again = sign_in(api, code)
    assert again.status_code == 401
    assert "was used before" in again.json()["detail"]


def test_code_requires_a_caller():
    api = GuardedApi()
    assert api.ask("POST", "/api/v1/sessions/code", json={}).status_code == 401


def test_code_is_no_token_and_a_token_no_code():
    api = GuardedApi(CLOSED)
    code = code_of(api, headers=ADMIN)
    assert api.ask("GET", "/api/v1/status", **bearer(code)).status_code == 401
    assert sign_in(api, "gpm_own").status_code == 401


def test_wrong_codes_are_limited():
    api = GuardedApi()
    assert [sign_in(api, "wrong").status_code for _ in range(11)] == [401] * 10 + [429]


def test_session_ends_with_its_callers_token():
    others = [*OTHERS, Token("ci", frozenset({"read"}), token_digest("gpm_ci"))]
    api = GuardedApi(CLOSED, others)
    own = session(api, **bearer("gpm_ci"))
    assert api.ask("GET", "/api/v1/status", **own).status_code == 200
    others.pop()
    assert api.ask("GET", "/api/v1/status", **own).status_code == 401


def test_session_ends_on_request():
    api = GuardedApi(CLOSED)
    own = session(api, headers=ADMIN)
    assert api.ask("DELETE", "/api/v1/sessions", **own).status_code == 204
    assert api.ask("GET", "/api/v1/status", **own).status_code == 401
    assert api.ask("DELETE", "/api/v1/sessions", headers=ADMIN).status_code == 404


def test_answers_are_not_stored_by_browsers():
    api = GuardedApi()
    answer = api.ask("POST", "/api/v1/sessions/code", json={}, headers=ADMIN)
    assert answer.headers["cache-control"] == "no-store"
    assert sign_in(api, answer.json()["code"]).headers["cache-control"] == "no-store"


@pytest.mark.parametrize("after", [SIGN_IN_CODE_SECONDS + 1, SESSION_SECONDS + 1])
def test_codes_and_sessions_end(after: float):
    sign_ins = SignIns()
    if after > SESSION_SECONDS:
        token = sign_ins.exchange(sign_ins.create_code(Caller("caller", frozenset()), None, 0.0), 0.0)
        assert token is not None
        assert sign_ins.session(token_digest(token), 1.0) is not None
        assert sign_ins.session(token_digest(token), after) is None
    else:
        assert sign_ins.exchange(sign_ins.create_code(Caller("caller", frozenset()), None, 0.0), after) is None


@pytest.mark.parametrize(("body", "seconds"), [({}, SIGN_IN_CODE_SECONDS), ({"valid_seconds": 600}, 600.0)])
def test_code_ends_at_the_requested_time(body: dict[str, float], seconds: float):
    api = GuardedApi()
    answer = api.ask("POST", "/api/v1/sessions/code", json=body, headers=ADMIN).json()
    assert answer["valid_seconds"] == seconds
    sign_ins = SignIns()
    code = sign_ins.create_code(Caller("caller", frozenset()), None, 0.0, seconds)
    assert sign_ins.exchange(code, seconds + 1) is None


def test_code_ends_after_at_most_ten_minutes():
    answer = GuardedApi().ask("POST", "/api/v1/sessions/code", json={"valid_seconds": 601}, headers=ADMIN)
    assert answer.status_code == 422


def test_oldest_code_of_a_caller_ends_above_the_limit():
    sign_ins = SignIns()
    other = sign_ins.create_code(Caller("other", frozenset()), None, 0.0)
    codes = [sign_ins.create_code(Caller("caller", frozenset()), None, 0.0) for _ in range(MAX_SIGN_INS_PER_CALLER + 1)]
    assert [sign_ins.exchange(code, 1.0) is not None for code in codes] == [False] + [True] * MAX_SIGN_INS_PER_CALLER
    assert sign_ins.exchange(other, 1.0) is not None
    for number in range(MAX_SIGN_INS + 1):
        sign_ins.create_code(Caller(f"caller-{number}", frozenset()), None, 0.0)
    assert len(sign_ins._codes) == MAX_SIGN_INS
