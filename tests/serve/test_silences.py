"""HTTP API of silences and receivers: authorization, mistakes and limits."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gpumond.serve.limits import SILENCES_PER_MINUTE
from tests.serve.application import TOKEN, View, ask, serving

RULE = {"name": "rule", "operator": "=", "value": "leak"}
BODY: dict[str, Any] = {"matchers": [RULE], "for_seconds": 60, "reason": "known"}


def create(view: View, body: dict[str, Any]) -> httpx.Response:
    return ask(view, "/api/v1/silences", "POST", headers=TOKEN, json=body)


def test_silence_is_created_read_and_ended():
    view = View()
    made = create(view, BODY)
    id = made.json()["silence"]["id"]
    assert (made.status_code, made.headers["location"]) == (201, f"/api/v1/silences/{id}")
    assert made.json()["state"] == "active"
    silence = made.json()["silence"]
    assert (silence["matchers"], silence["reason"], silence["author"]) == ([RULE], "known", "token@loopback")
    entry = {name: value for name, value in made.json().items() if name != "alerts"}
    assert ask(view, f"/api/v1/silences/{id}").json() == entry
    assert ask(view, "/api/v1/silences").json() == [entry]
    for _ in range(2):
        assert ask(view, f"/api/v1/silences/{id}", "DELETE", headers=TOKEN).status_code == 204
    assert ask(view, f"/api/v1/silences/{id}").json()["state"] == "ended"
    assert ask(view, f"/api/v1/silences/{'0' * 16}", "DELETE", headers=TOKEN).status_code == 404


def test_silences_without_token_are_unchanged():
    view = View()
    assert ask(view, "/api/v1/silences", "POST", json=BODY).status_code == 401
    assert ask(view, f"/api/v1/silences/{'0' * 16}", "DELETE").status_code == 401
    assert ask(view, "/api/v1/receivers/log/test", "POST").status_code == 401
    assert ask(view, "/api/v1/silences").json() == []


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"matchers": []}, "body.matchers: must have at least 1 entry"),
        ({"matchers": [RULE] * 9}, "at most 8 entries"),
        ({"matchers": [RULE | {"operator": "~"}]}, "body.matchers.0.operator: expected =, !=, =~ or !~"),
        ({"matchers": [RULE | {"name": "a b"}]}, "body.matchers.0.name: must have the form"),
        ({"matchers": [RULE | {"value": "a\nb"}]}, "has a control character, such as a newline; remove it"),
        ({"matchers": [RULE | {"value": "a" * 257}]}, "body.matchers.0.value: must have at most 256"),
        ({"matchers": [RULE | {"operator": "=~", "value": "["}]}, "matchers.0: rule=~[: not a regular expression"),
        ({"matchers": [RULE | {"operator": "!="}]}, "at least one matcher must not match the empty string"),
        ({"matchers": ["rule=leak"]}, "body.matchers.0: "),
        ({"for_seconds": "60"}, "body.for_seconds: must be a number"),
        ({"for_seconds": 0}, "body.for_seconds: must be above 0"),
        ({"for_seconds": None}, "pass exactly one of ends_at and for_seconds"),
        ({"ends_at": 1e12}, "pass exactly one of ends_at and for_seconds"),
        ({"ends_at": 1.0, "for_seconds": None}, "ends_at must be after now and after starts_at"),
        ({"ends_at": 1e12, "for_seconds": None}, "the silence must end within 366 days"),
        ({"starts_at": 1e12}, "the silence must end within 366 days"),
        ({"reason": ""}, "body.reason: must have at least 1 character"),
        ({"reason": " "}, "reason must not be empty; pass, for example, a ticket number"),
        ({"reason": "a" * 513}, "at most 512 characters"),
        ({"author": "a\x1b[31m"}, "has a control character"),
        ({"comment": "x"}, "body.comment: unknown key"),
    ],
)
def test_mistake_in_a_silence_is_named(change: dict[str, Any], detail: str):
    view = View()
    answer = create(view, BODY | change)
    assert (answer.status_code, ask(view, "/api/v1/silences").json()) == (422, [])
    assert detail in answer.json()["detail"]


def test_silence_that_cannot_be_stored_is_not_in_effect():
    view = View()
    view.store.full = True
    assert create(view, BODY).status_code == 507
    assert ask(view, "/api/v1/silences").json() == []


def test_changes_of_one_caller_are_limited():
    app = serving(View())

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917", headers=TOKEN) as client:
            return [await client.post("/api/v1/silences", json=BODY) for _ in range(SILENCES_PER_MINUTE + 1)]

    *accepted, refused = asyncio.run(run())
    assert {answer.status_code for answer in accepted} == {201}
    assert refused.status_code == 429
    assert "too many silence changes by this caller; retry in" in refused.json()["detail"]
    assert refused.headers["retry-after"]


def test_receiver_test_returns_the_answer_of_the_receiver():
    answer = ask(View(), "/api/v1/receivers/ops/test", "POST", headers=TOKEN)
    assert (answer.status_code, answer.json()["accepted"], answer.json()["status"]) == (200, True, 200)
