"""HTTP API with a view of fixed values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gpumond.config.settings import Compat
from gpumond.facts.errors import (
    AlreadyUnderWay,
    ConfigError,
    CoolingDown,
    FlushError,
    NoSuchQuota,
    NoSuchRule,
    NoSuchTarget,
    QuotaChanged,
    RuleChanged,
    StoreUnavailable,
)
from gpumond.facts.frame import Alert, Frame
from gpumond.facts.messages import AgentResponse, Asked
from gpumond.facts.persisted import KeptAdmission
from gpumond.facts.pools import Receipt
from gpumond.facts.silence import Silence
from gpumond.features.alerts.hook import AlertmanagerHook
from gpumond.features.alerts.receiver_check import ReceiverTest
from gpumond.features.alerts.routes import EXAMPLE
from gpumond.features.flush.flusher import FlushOutcome, FlushRequest
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.registry import QuotaRegistry
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.evaluation import Rule, ended
from gpumond.features.rules.preview import Preview, pack, preview
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.silences.silences import Silences
from gpumond.metrics.exposition import ALL_GROUPS, Exposition, Form, Group, Page
from gpumond.metrics.telemetry import Telemetry
from gpumond.serve.app import create_app, state_of
from gpumond.serve.auth import Tokens
from gpumond.serve.event_log import EventLog
from gpumond.serve.examples import ALERT, AUDIT_ENTRY, DEVICE, RECEIPT, REPORT, SNAPSHOT
from gpumond.store.audit import AuditEntry
from gpumond.tick.history import History
from gpumond.tick.observe import EngineState, advance

FRAME = advance(EngineState(), BUILT_IN, SNAPSHOT).frame
TOKEN = {"Authorization": "Bearer secret"}


class MemoryStore:
    """In-memory store."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[str, dict[str, Any]]] = {}
        self.stored_quotas: dict[str, tuple[str, dict[str, Any]]] = {}
        self.stored_overrides: dict[str, dict[str, Any]] = {}
        self.stored_admissions: list[KeptAdmission] = []
        self.audited: list[tuple[str, str, Any]] = []
        self.full = False

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)
        self.audited.append((actor, action, detail))

    async def audit_entries(self, *, users: bool) -> list[AuditEntry]:
        return []

    async def rules(self) -> dict[str, tuple[str, dict[str, Any]]]:
        return self.stored

    async def put_rule(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str:
        self._may_change(name, if_match)
        self.stored[name] = (f"{len(self.stored)}-{hash(str(body))}", dict(body))
        return self.stored[name][0]

    async def delete_rule(self, name: str, actor: str, if_match: str | None = None) -> None:
        if name not in self.stored:
            raise NoSuchRule(f"no rule {name}")
        self._may_change(name, if_match)
        del self.stored[name]

    async def quotas(self) -> dict[str, tuple[str, dict[str, Any]]]:
        return self.stored_quotas

    async def put_quota(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)
        if if_match is not None and if_match != self.stored_quotas.get(name, ("",))[0]:
            raise QuotaChanged(f"{name} has changed")
        self.stored_quotas[name] = (f"{len(self.stored_quotas)}-{hash(str(body))}", dict(body))
        return self.stored_quotas[name][0]

    async def delete_quota(self, name: str, actor: str, if_match: str | None = None) -> None:
        if name not in self.stored_quotas:
            raise NoSuchQuota(f"no quota {name}")
        del self.stored_quotas[name]

    async def overrides(self) -> dict[str, dict[str, Any]]:
        return self.stored_overrides

    async def admissions(self) -> list[KeptAdmission]:
        return self.stored_admissions

    async def keep_admissions(self, admissions: Sequence[KeptAdmission]) -> None:
        self.stored_admissions = list(admissions)

    async def put_override(self, name: str, fields: Mapping[str, Any], actor: str) -> None:
        self._may_change(name, None)
        self.stored_overrides[name] = dict(fields)

    async def delete_override(self, name: str, actor: str) -> None:
        self._may_change(name, None)
        del self.stored_overrides[name]

    async def silences(self) -> list[Silence]:
        return []

    async def put_silence(self, silence: Silence, removed: Sequence[str], actor: str, action: str) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)

    def _may_change(self, name: str, if_match: str | None) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)
        if if_match is not None and if_match != self.stored.get(name, ("",))[0]:
            raise RuleChanged(f"{name} has changed")


class View:
    def __init__(
        self,
        frame: Frame | None = FRAME,
        answer: FlushOutcome | FlushError | None = None,
        history: History | None = None,
    ) -> None:
        self.started_at, self.store_file = 1.0, Path("/var/lib/gpumond/gpumond.db")
        self.history = history or History()
        self.store = MemoryStore()
        self.rulebook = RuleRegistry(BUILT_IN, (), self.store)
        self.quotas = QuotaRegistry((), self.store)
        self.admissions = Admissions(self.flush, lambda: "user", lambda pid: None, lambda: 1.0, self.store)
        self.hook = AlertmanagerHook(self.flush, self.store, lambda: ("node7",), lambda: False)
        self.wrong_configuration = ""
        self.frame = frame
        self.answer = answer or FlushOutcome("id", (RECEIPT,), RECEIPT.released_bytes)
        self.flush_requests: list[FlushRequest] = []
        self.silences = Silences(self.store)
        self.events = EventLog(1.0)
        self.agent_requests: list[tuple[object, ...]] = []
        self.response: AgentResponse | None = None
        self._exposition = Exposition(Telemetry())
        self.answers: dict[str, bytes] = {}

    async def await_frame(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return False

    def receipts(self) -> list[Receipt]:
        return [RECEIPT]

    async def metrics(self, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Page:
        return self._exposition.page(self.frame, Form.of(accept, compat, groups))

    def past_alerts(self) -> list[Alert]:
        return [ended(ALERT, 2.0)]

    async def audit_entries(self, limit: int) -> list[AuditEntry]:
        return [AUDIT_ENTRY][:limit]

    async def preview(self, rule: Rule, share: float) -> Preview:
        return preview(rule, [pack(SNAPSHOT, ())])

    async def reload(self, requested_by: str) -> str:
        if self.wrong_configuration:
            raise ConfigError(self.wrong_configuration)
        return "reloaded"

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome:
        self.flush_requests.append(request)
        if isinstance(self.answer, FlushError):
            raise self.answer
        return self.answer

    async def ask(
        self,
        pid: int,
        kind: Asked,
        limit_bytes: int | None,
        device: str | None,
        requested_by: str,
        record_seconds: float | None = None,
    ) -> AgentResponse | None:
        self.agent_requests.append((pid, kind, limit_bytes, device))
        return self.response

    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest:
        return EXAMPLE

    async def fetch(
        self, pid: int, snapshot_id: int, requested_by: str
    ) -> tuple[int, AsyncGenerator[bytes, None]] | AgentResponse | None:
        return AgentResponse("id", f"snapshot {snapshot_id} does not exist; kept are: none")

    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        return 1.0 + seconds, seconds < 100


@asynccontextmanager
async def no_lifespan() -> AsyncIterator[None]:
    yield


@cache
def application() -> FastAPI:
    """Application whose state a test replaces, because its routes take long to make."""
    return create_app(View(), Tokens("secret"), no_lifespan)


def ask(view: View, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    app = application()
    app.state = state_of(view, Tokens("secret"))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_json_keys_are_the_field_names_of_the_types():
    snapshot = ask(View(), "/api/v1/snapshot").json()
    assert snapshot["devices"][0]["used_bytes"] == DEVICE.used_bytes
    assert snapshot["reports"][0]["pools"][0]["reclaimable"]["likely"] == REPORT.pools[0].reclaimable.likely
    (process,) = ask(View(), "/api/v1/processes").json()
    assert process["cached_bytes"] == 40 * 1024**3
    assert process["opaque_bytes"] is None
    assert process["workload"] == "train"


FRAME_ROUTES = ("snapshot", "devices", "processes", "agents", "ledger", "verdicts", "alerts", "status")


@pytest.mark.parametrize("route", [*FRAME_ROUTES, "rules", "rules/device-lost", "receipts", "alerts/history", "audit"])
def test_read_routes_need_no_token_and_answer_503_before_the_first_frame(route: str):
    assert ask(View(), f"/api/v1/{route}").status_code == 200
    early = ask(View(frame=None), f"/api/v1/{route}")
    assert early.status_code == (503 if route in FRAME_ROUTES else 200)


def test_metrics_are_text_or_openmetrics_plain_or_compressed():
    text = ask(View(), "/metrics", headers={"Accept-Encoding": "identity"})
    assert text.headers["content-type"].startswith("text/plain; version=")
    zipped = ask(View(), "/metrics", headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip"
    for refused in ("x-gzip", "gzip;q=0"):
        assert "content-encoding" not in ask(View(), "/metrics", headers={"Accept-Encoding": refused}).headers
    assert zipped.text == text.text
    newer = ask(View(), "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert newer.headers["content-type"].startswith("application/openmetrics-text")
    assert newer.text.endswith("# EOF\n")
    assert ask(View(frame=None), "/metrics").status_code == 200


def test_liveness_is_not_readiness():
    assert ask(View(frame=None), "/-/healthy").status_code == 200
    assert ask(View(frame=None), "/-/ready").status_code == 503
    assert ask(View(), "/-/ready").status_code == 200
    assert ask(View(frame=None), "/readyz").status_code == 503
    assert [ask(View(), path).status_code for path in ("/readyz", "/healthz")] == [200, 200]


def test_flush_returns_its_receipts():
    view = View()
    answer = ask(
        view, "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"pid": 4242}, "steps": ["cache", "ipc"]}
    )
    assert answer.status_code == 200
    assert answer.json()["receipts"][0]["outcome"] == "freed"
    assert answer.json()["released_bytes"] == RECEIPT.released_bytes
    assert view.flush_requests[0].steps == ("ipc", "cache")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}])
def test_flush_without_token_is_refused(headers: dict[str, str]):
    view = View()
    answer = ask(view, "/api/v1/flushes", "POST", headers=headers, json={"target": {"all": True}})
    assert (answer.status_code, view.flush_requests) == (401, [])
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("error", "status"),
    [(NoSuchTarget("no"), 404), (AlreadyUnderWay("busy"), 409), (CoolingDown("soon", 12.0), 429)],
)
def test_flush_errors_are_problem_documents(error: FlushError, status: int):
    answer = ask(View(answer=error), "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"all": True}})
    assert answer.status_code == answer.json()["status"] == status
    assert answer.json()["detail"] == str(error)
    assert answer.headers.get("retry-after") == ("12" if status == 429 else None)


def test_unfinished_flush_is_never_200():
    timeout = FlushOutcome("id", (RECEIPT, Receipt(**{**_fields(RECEIPT), "outcome": "timeout"})), 1)
    answer = ask(View(answer=timeout), "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"all": True}})
    assert answer.status_code == 504
    assert [receipt["outcome"] for receipt in answer.json()["receipts"]] == ["freed", "timeout"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "target"),
        ({"target": {}}, "exactly one"),
        ({"target": {"pid": 1, "all": True}}, "exactly one"),
        ({"target": {"pid": "1"}}, "pid"),
        ({"target": {"pid": -1}}, "pid"),
        ({"target": {"all": True}, "steps": ["magic"]}, "unknown step 'magic'"),
        ({"target": {"all": True}, "steps": []}, "at least one"),
        ({"target": {"all": True}, "dryrun": True}, "dryrun"),
        ({"target": {"all": True}, "timeout_seconds": 0}, "timeout_seconds"),
        ({"target": {"all": True}, "min_reclaimable_bytes": -1}, "min_reclaimable_bytes"),
    ],
)
def test_invalid_request_names_the_expected_values(body: dict[str, Any], says: str):
    view = View()
    answer = ask(view, "/api/v1/flushes", "POST", headers=TOKEN, json=body)
    assert (answer.status_code, view.flush_requests) == (422, [])
    assert says in answer.json()["detail"]


def test_release_returns_its_end_and_504_if_the_driver_is_still_held():
    free = ask(View(), "/api/v1/release", "POST", headers=TOKEN, json={"for_seconds": 60})
    assert (free.status_code, free.json()) == (200, {"released_until": 61.0})
    assert ask(View(), "/api/v1/release", "POST", headers=TOKEN, json={"for_seconds": 600}).status_code == 504
    assert ask(View(), "/api/v1/release", "POST", json={"for_seconds": 60}).status_code == 401


def test_openapi_describes_every_route_with_an_example_of_its_answer():
    document = ask(View(), "/openapi.json").json()
    assert {"/metrics", "/-/healthy", "/-/ready", "/api/v1/flushes", "/api/v1/ledger"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
            good = next(
                operation["responses"][code] for code in ("200", "201", "202", "204") if code in operation["responses"]
            )
            good = good.get("content", {})
            if "application/json" in good:
                assert good["application/json"]["schema"], path
                assert "example" in good["application/json"], path
    assert "Receipt" in document["components"]["schemas"]
    assert json.dumps(document)


def test_unknown_routes_are_problems_too():
    answer = ask(View(), "/api/v1/nothing")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def _fields(receipt: Receipt) -> dict[str, Any]:
    return {name: getattr(receipt, name) for name in receipt.__slots__}
