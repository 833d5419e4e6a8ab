"""HTTP API of baselines with a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest
from pydantic import TypeAdapter

from gpumond.features.baselines.recorder import BaselineService, baseline_table
from gpumond.features.baselines.statistics import Comparison, compare
from gpumond.store.store import Store
from tests.helpers.agents import GIB
from tests.helpers.training import training
from tests.serve.application import serving

T = TypeVar("T")
TOKEN = {"Authorization": "Bearer secret"}


class BaselinesApi:
    """Store, its baselines, and a client of the API."""

    def __init__(self, store: Store, client: httpx.AsyncClient, baselines: BaselineService) -> None:
        self.store, self.baselines, self._client = store, baselines, client

    async def ask(self, method: str, path: str = "", body: Any = None, token: bool = True) -> httpx.Response:
        return await self._client.request(method, f"/api/v1/baselines{path}", json=body, headers=TOKEN if token else {})

    async def measure(self, path: str, live: int, seconds: int = 10, start: int = 0) -> None:
        """Feed readings until the recording is complete and stored."""
        for second in range(start, start + seconds + 1):
            self.baselines.add(training(second, live))
        for _ in range(200):
            if (await self.ask("GET", path)).json()["complete"]:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"{path} is not complete")


def with_api(path: Path, work: Callable[[BaselinesApi], Awaitable[T]]) -> T:
    async def run() -> T:
        store = Store(path / "gpumond.db")
        await store.open()
        baselines = BaselineService(store)
        app = serving(SimpleNamespace(get=lambda kind: baselines))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            try:
                return await work(BaselinesApi(store, client, baselines))
            finally:
                await store.close()

    return asyncio.run(run())


def test_measure_change_measure_compare_delete(tmp_path: Path):
    async def work(api: BaselinesApi) -> None:
        begun = await api.ask("PUT", "/n", {"for_seconds": 10})
        assert (begun.status_code, begun.json()["complete"]) == (202, False)
        assert [each["complete"] for each in (await api.ask("GET")).json()] == [False]
        await api.measure("/n", GIB)
        kept = (await api.ask("GET", "/n")).json()
        assert (kept["complete"], kept["seconds"], kept["workloads"][0]["workload"]) == (True, 10, "train")
        (entry,) = (await api.ask("GET")).json()
        assert (entry["name"], entry["complete"], entry["workloads"]) == ("n", True, ["train"])
        assert (await api.ask("GET", "/n/compare")).status_code == 404
        assert (await api.ask("POST", "/n/compare", {"for_seconds": 10})).status_code == 202
        await api.measure("/n/compare", 2 * GIB, start=100)
        found = (await api.ask("GET", "/n/compare")).json()
        live = {each["stat"]: each for each in found["differences"] if each["measure"] == "live"}
        assert (live["peak"]["difference"], live["typical"]["ratio"], found["complete"]) == (GIB, 1.0, True)
        assert (await api.ask("DELETE", "/n")).status_code == 204
        assert (await api.ask("GET", "/n")).status_code == 404
        audited = [(entry.actor, entry.action) for entry in await api.store.audit_entries()]
        assert audited == [("token@loopback", f"baseline.{what}") for what in ("record", "compare", "delete")]

    with_api(tmp_path, work)


def test_two_baselines_are_compared(tmp_path: Path):
    async def work(api: BaselinesApi) -> None:
        for number, name in enumerate(("before", "after"), 1):
            await api.ask("PUT", f"/{name}", {"for_seconds": 10})
            await api.measure(f"/{name}", number * GIB, start=100 * number)
        found = await api.ask("GET", "/before/compare?with=after")
        expected = compare(await api.baselines.get("before"), await api.baselines.get("after"))
        assert found.json() == json.loads(TypeAdapter(Comparison).dump_json(expected))
        assert {each.difference for each in expected.differences if each.measure == "live"} == {GIB}
        missing = await api.ask("GET", "/before/compare?with=other")
        assert (missing.status_code, "there is no baseline other" in missing.json()["detail"]) == (404, True)
        assert (await api.ask("GET", "/before/compare?with=a%20b")).status_code == 422

    with_api(tmp_path, work)


def test_complete_baselines_survive_a_restart(tmp_path: Path):
    async def before(api: BaselinesApi) -> None:
        await api.ask("PUT", "/kept", {"for_seconds": 10})
        await api.measure("/kept", GIB)
        await api.ask("PUT", "/lost", {"for_seconds": 10})

    async def after(api: BaselinesApi) -> list[str]:
        return [entry["name"] for entry in (await api.ask("GET")).json()]

    with_api(tmp_path, before)
    assert with_api(tmp_path, after) == ["kept"]


def test_new_baseline_discards_the_comparison_with_the_old_one(tmp_path: Path):
    async def work(api: BaselinesApi) -> int:
        for method, path in (("PUT", "/n"), ("POST", "/n/compare"), ("PUT", "/n")):
            await api.ask(method, path, {"for_seconds": 10})
            await api.measure(path, GIB)
        return (await api.ask("GET", "/n/compare")).status_code

    assert with_api(tmp_path, work) == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/n", {"for_seconds": 0}, 422),
        ("PUT", "/n", {"for_seconds": 10, "what": 1}, 422),
        ("PUT", "/n", {}, 422),
        ("PUT", "/a%20b", {"for_seconds": 10}, 422),
        ("PUT", "/-n", {"for_seconds": 10}, 422),
        ("POST", "/n/compare", {"for_seconds": 10}, 404),
        ("GET", "/n", None, 404),
        ("GET", "/n/compare", None, 404),
        ("DELETE", "/n", None, 404),
    ],
)
def test_invalid_requests_are_refused_and_not_audited(tmp_path: Path, method: str, path: str, body: Any, status: int):
    async def work(api: BaselinesApi) -> None:
        refused = await api.ask(method, path, body)
        assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json")
        assert refused.json()["detail"]
        assert await api.store.audit_entries() == []

    with_api(tmp_path, work)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/n"), ("DELETE", "/n"), ("POST", "/n/compare")])
def test_changes_require_a_token(tmp_path: Path, method: str, path: str):
    async def work(api: BaselinesApi) -> int:
        return (await api.ask(method, path, {"for_seconds": 10}, token=False)).status_code

    assert with_api(tmp_path, work) == 401


def test_number_of_baselines_is_limited(tmp_path: Path):
    async def work(api: BaselinesApi) -> int:
        await api.ask("PUT", "/n", {"for_seconds": 1})
        await api.measure("/n", GIB, seconds=1)
        table = baseline_table(api.store, "before")
        (row,) = await table.rows()
        for number in range(200):
            await table.put(f"n{number}", replace(row.value, name=f"n{number}"))
        return (await api.ask("PUT", "/one-more", {"for_seconds": 1})).status_code

    assert with_api(tmp_path, work) == 409
