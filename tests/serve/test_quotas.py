"""HTTP API of quotas: origins, authorization, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gpumond.config.tokens import Token, token_digest
from gpumond.features.quotas.quotas import quota_table
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.serve.authentication import Tokens
from tests.serve.application import TOKEN, View, ask, serving
from tests.serve.guarded import PeerMiddleware

GIB = 1 << 30
TEAM: dict[str, Any] = {"name": "team", "match": {"workload": "train-*", "user": "research"}, "limit": "40GiB"}
PATH = "/api/v1/quotas/team"


def put(view: View, body: dict[str, Any], if_match: str | None = None) -> httpx.Response:
    return ask(view, PATH, "PUT", headers=TOKEN | ({"If-Match": if_match} if if_match else {}), json=body)


def test_quota_is_created_read_replaced_and_deleted():
    view = View()
    made = put(view, TEAM)
    assert (made.status_code, made.headers["location"]) == (200, PATH)
    read = ask(view, PATH)
    etag = made.headers["etag"]
    assert read.json() == made.json()
    assert read.json() == {
        "name": "team",
        "origin": "api",
        "etag": etag.strip('"'),
        "quota": TEAM | {"limit": 40 * GIB},
    }
    assert ask(view, "/api/v1/quotas").json() == [read.json()]
    replaced = put(view, read.json()["quota"] | {"soft_limit": "30GiB"}, etag)
    assert (replaced.status_code, view.quotas.table.quotas[0].soft_limit_bytes) == (200, 30 * GIB)
    assert put(view, TEAM, etag).status_code == 412
    assert ask(view, PATH, "DELETE", headers=TOKEN).status_code == 204
    assert (ask(view, PATH).status_code, view.quotas.table.quotas) == (404, ())
    assert ask(view, PATH, "DELETE", headers=TOKEN).status_code == 404


def test_quota_of_the_configuration_file_is_read_only():
    view = View()
    view.quotas.configure([QuotaConfig.model_validate(TEAM).quota()])
    assert ask(view, PATH).json()["origin"] == "file"
    for refused in (put(view, TEAM), ask(view, PATH, "DELETE", headers=TOKEN)):
        assert refused.status_code == 409
        assert "configuration file" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"limit": "half"}, "a size such as 40GiB"),
        ({"limit": "50%"}, "not a fraction of the device"),
        ({"limit": 0}, "must be at least 1"),
        ({"limit": True}, "a size such as 40GiB"),
        ({"limit": 1.5}, "a whole number of bytes"),
        ({"limit": "-1GiB"}, "a size such as 40GiB"),
        ({"limit": "9" * 18 + "TiB"}, "expected a smaller number"),
        ({"limit": None}, "at least one of soft_limit, limit, reserve and cgroup_limit"),
        ({"soft_limit": "41GiB"}, "soft_limit 41.0 GiB must not exceed limit 40.0 GiB"),
        ({"reserve": "41GiB"}, "reserve 41.0 GiB must not exceed limit 40.0 GiB"),
        ({"reserve": "1GiB", "match": {"workload": "prod"}}, "also match on user or namespace (not *)"),
        ({"reserve": "1GiB", "match": {"container": "prod"}}, "also match on user or namespace (not *)"),
        ({"reserve": "1GiB", "match": {"workload": "prod", "user": "*"}}, "also match on user or namespace (not *)"),
        ({"match": {}}, "expected a pattern"),
        ({"match": {"group": "a"}}, "match.group"),
        ({"match": {"user": "a\nb"}}, "control character"),
        ({"hard": 1}, "hard"),
        ({"name": "other"}, "differs from the name in the path"),
    ],
)
def test_invalid_quota_states_what_is_expected(change: dict[str, Any], detail: str):
    view = View()
    answer = put(view, TEAM | change)
    assert (answer.status_code, view.quotas.table.quotas) == (422, ())
    assert detail in answer.json()["detail"]


@pytest.mark.parametrize(("size", "size_bytes"), [("1.5 GiB", 3 << 29), ("100MB", 100_000_000), ("5", 5), (7, 7)])
def test_sizes_are_texts_or_integers(size: object, size_bytes: int):
    assert put(View(), TEAM | {"limit": size}).json()["quota"]["limit"] == size_bytes


def test_unprivileged_users_and_scopes_are_refused_by_name():
    view = View()
    tokens = Tokens("secret", file_tokens=lambda: (Token("ci", frozenset({"flush"}), token_digest("flusher")),))
    app = serving(view, tokens)

    async def send(uid: int | None, headers: dict[str, str], method: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=PeerMiddleware(app, uid, "127.0.0.1"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, PATH, headers=headers, json=TEAM if method == "PUT" else None)

    for method in ("PUT", "DELETE"):
        foreign = asyncio.run(send(1000, {}, method))
        assert (foreign.status_code, foreign.json()["detail"]) == (
            403,
            "uid:1000 lacks the `rules` scope; ask an administrator, or use a token that has it",
        )
        scoped = asyncio.run(send(None, {"Authorization": "Bearer flusher"}, method))
        assert (scoped.status_code, scoped.json()["detail"]) == (
            403,
            "token:ci lacks the `rules` scope; add it to its line in tokens_file",
        )
        assert asyncio.run(send(None, {}, method)).status_code == 401
    assert view.quotas.table.quotas == ()


def test_quota_that_cannot_be_stored_is_not_in_effect():
    view = View()
    view.store.full = True
    assert (put(view, TEAM).status_code, view.quotas.table.quotas) == (507, ())


def test_stored_quota_that_cannot_be_read_is_skipped_and_named():
    view = View()
    for quota in (TEAM, TEAM | {"name": "later", "color": "red"}):
        asyncio.run(quota_table(view.store).put(quota["name"], quota))
    (wrong,) = asyncio.run(view.quotas.load())
    assert wrong.startswith("later: ")
    assert [entry.name for entry in view.quotas.entries()] == ["team"]
