"""HTTP API of rules: origins, authorization, and concurrent writers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gpumond.config.settings import Settings
from gpumond.facts.alerts import Rule
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.evaluation import Preview
from gpumond.features.rules.registry import rule_table
from tests.serve.application import HOG, TOKEN, View, ask, serving
from tests.serve.guarded import PeerMiddleware


def put(view: View, body: dict[str, Any], if_match: str | None = None) -> Any:
    headers = TOKEN | ({"If-Match": if_match} if if_match else {})
    return ask(view, f"/api/v1/rules/{body['name']}", "PUT", headers=headers, json=body)


def names(view: View) -> list[str]:
    return [rule.name for rule in view.rulebook.rules]


def test_rule_is_created_read_replaced_and_deleted():
    view = View()
    made = ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG)
    assert (made.status_code, made.headers["location"]) == (201, "/api/v1/rules/hog")
    read = ask(view, "/api/v1/rules/hog")
    assert (
        read.json()
        == made.json()
        == {
            "name": "hog",
            "origin": "api",
            "etag": made.headers["etag"].strip('"'),
            "rule": HOG | {"above": 40 * 1024**3, "for": 300},
            "enabled": True,
            "overrides": {},
        }
    )
    replaced = put(view, read.json()["rule"] | {"above": "50GiB"}, read.headers["etag"])
    assert (replaced.status_code, replaced.json()["rule"]["above"]) == (200, 50 * 1024**3)
    assert view.rulebook.rules[-1].above == 50 * 1024**3
    removed = ask(view, "/api/v1/rules/hog", "DELETE", headers=TOKEN | {"If-Match": replaced.headers["etag"]})
    assert (removed.status_code, ask(view, "/api/v1/rules/hog").status_code, "hog" in names(view)) == (204, 404, False)


def test_if_match_of_another_version_changes_nothing():
    view = View()
    first = ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG).headers["etag"]
    assert put(view, HOG | {"above": "50GiB"}, first).status_code == 200
    assert put(view, HOG | {"above": "60GiB"}, first).status_code == 412
    assert ask(view, "/api/v1/rules/hog", "DELETE", headers=TOKEN | {"If-Match": first}).status_code == 412
    assert view.rulebook.rules[-1].above == 50 * 1024**3


def test_configured_and_built_in_rules_are_read_only_and_name_where_to_change_them():
    view = View()
    view.rulebook.configure(Settings(rules=(Rule(name="mine", scope="device", value="used_ratio", above=0.5),)))
    for name, hint in (("mine", "configuration file"), ("device-lost", "disabled_rules")):
        body = ask(view, f"/api/v1/rules/{name}").json()["rule"]
        refused = [put(view, body), ask(view, f"/api/v1/rules/{name}", "DELETE", headers=TOKEN)]
        assert [answer.status_code for answer in refused] == [409, 409]
        assert all(hint in answer.json()["detail"] for answer in refused)
    again = ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG)
    assert (again.status_code, ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG).status_code) == (201, 409)


def test_rules_round_trip_unchanged():
    """Writing a rule as it was read changes nothing."""
    entries = ask(View(), "/api/v1/rules").json()
    assert {entry["origin"] for entry in entries} == {"built-in"}
    view = View()
    view.rulebook.configure(Settings(disabled_rules=tuple(rule.name for rule in BUILT_IN)))
    for entry in entries:
        assert ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=entry["rule"]).json()["rule"] == entry["rule"]
    assert view.rulebook.rules == BUILT_IN


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"value": "mood"}, "'mood'"),
        ({"above": "lots"}, "80%"),
        ({"below": 1}, "exactly one of above and below"),
        ({"frequency": 1}, "frequency"),
        ({"annotations": {"summary": "{gpu} {mood}"}}, "has no placeholder 'mood'; it has"),
        ({"match": {"color": "red"}}, "has no label 'color'; it has gpu, uuid, pid"),
        ({"labels": {"pid": "1"}}, "'pid' is set by gpumond itself"),
        ({"labels": {"a b": "1"}}, "'a b' isn't a valid label name"),
        ({"action": {"flush": {"steps": ["reboot"]}}}, "'reboot'"),
        ({"scope": "daemon", "value": "agents", "above": 1, "action": {"flush": {}}}, "nothing to flush"),
        (
            {"scope": "device", "value": "used_ratio", "above": "90%", "action": {"flush": {}, "request_end": True}},
            "request_end requires the process scope",
        ),
        ({"name": "other"}, "differs from the name in the path"),
    ],
)
def test_invalid_rule_names_the_expected_values(change: dict[str, Any], detail: str):
    view = View()
    answer = ask(view, "/api/v1/rules/hog", "PUT", headers=TOKEN, json=HOG | change)
    assert (answer.status_code, names(view)) == (422, [rule.name for rule in BUILT_IN])
    assert detail in answer.json()["detail"]


def test_rules_without_token_are_unchanged():
    view = View()
    assert ask(view, "/api/v1/rules", "POST", json=HOG).status_code == 401
    assert ask(view, "/api/v1/rules/hog", "PUT", json=HOG).status_code == 401
    assert ask(view, "/api/v1/rules/hog", "DELETE").status_code == 401
    assert ask(view, "/-/reload", "POST").status_code == 401
    assert not view.store.names("rules")


def test_rule_that_cannot_be_stored_is_not_in_effect():
    view = View()
    view.store.full = True
    answer = ask(view, "/api/v1/rules", "POST", headers=TOKEN, json=HOG)
    assert (answer.status_code, "hog" in names(view)) == (507, False)


def test_preview_lists_alerts_and_changes_nothing():
    view = View()
    full = {"name": "full", "scope": "device", "value": "used_ratio", "above": "90%"}
    result = ask(view, "/api/v1/rules/preview", "POST", json=full).json()
    assert [(past["rule"], past["resolved_at"]) for past in result["fired"]] == [("full", None)]
    assert ask(view, "/api/v1/rules/preview", "POST", json=full | {"above": 2}).json()["fired"] == []
    assert "full" not in names(view)


def test_reload_states_why_the_configuration_is_invalid():
    view = View()
    assert ask(view, "/-/reload", "POST", headers=TOKEN).status_code == 200
    view.wrong_configuration = "gpumond.yaml: listen: 'nowhere'"
    answer = ask(view, "/-/reload", "POST", headers=TOKEN)
    assert (answer.status_code, answer.json()["detail"]) == (422, view.wrong_configuration)


def test_stored_rule_that_cannot_be_read_is_left_out_and_named():
    view = View()
    for rule in (HOG, HOG | {"name": "later", "scope": "galaxy"}):
        asyncio.run(rule_table(view.store).put(rule["name"], rule))
    (wrong,) = asyncio.run(view.rulebook.load())
    assert wrong.startswith("later: ")
    assert names(view)[-1] == "hog"
    view.rulebook.configure(Settings(rules=(Rule(name="hog", scope="device", value="used_ratio", above=0.5),)))
    assert [entry.origin for entry in view.rulebook.entries() if entry.name == "hog"] == ["file"]


class SlowPreviewView(View):
    """View whose previews last until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.release = 0, asyncio.Event()

    async def preview(self, rule: Rule) -> Preview:
        self.started += 1
        await self.release.wait()
        return await super().preview(rule)


def test_previews_are_limited_to_two_and_one_per_user():
    async def run() -> None:
        view = SlowPreviewView()
        app = serving(view)

        def preview(uid: int | None, client: str = "127.0.0.1") -> asyncio.Task[httpx.Response]:
            async def send() -> httpx.Response:
                transport = httpx.ASGITransport(app=PeerMiddleware(app, uid, client))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                    return await http.post("/api/v1/rules/preview", json=HOG)

            return asyncio.create_task(send())

        first = preview(None)
        while view.started < 1:
            await asyncio.sleep(0.001)
        assert (await preview(None, "127.0.0.2")).status_code == 429  # another address of loopback
        second = preview(1000)
        while view.started < 2:
            await asyncio.sleep(0.001)
        third = await preview(1001)
        assert (third.status_code, third.headers["retry-after"], view.started) == (503, "1", 2)
        view.release.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]
        assert (await preview(1001)).status_code == 200

    asyncio.run(run())
