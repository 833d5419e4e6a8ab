"""HTTP application with a view of fixed values, and requests to it."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.datastructures import State

from gpumond.config.settings import Settings
from gpumond.core import ConfigHashes
from gpumond.events import EventLog
from gpumond.facts.alerts import Rule, as_resolved
from gpumond.facts.errors import ConfigError, FlushError
from gpumond.facts.flush import FlushRequest, FlushResponse
from gpumond.facts.frame import Alert, Frame
from gpumond.facts.messages import AgentResponse, RequestKind
from gpumond.facts.pools import Receipt
from gpumond.features import routers
from gpumond.features.alerts.dispatcher import ReceiverTest
from gpumond.features.alerts.routes import EXAMPLE
from gpumond.features.flush.alertmanager_hook import AlertmanagerHook
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.quotas import QuotaRegistry
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.evaluation import Preview, pack_moment, preview
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.silences.silences import Silences
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Exposition, Group, Scrape, ScrapeFormat
from gpumond.metrics.telemetry import Telemetry
from gpumond.serve.app import app_state, create_app
from gpumond.serve.authentication import Tokens
from gpumond.serve.examples import ALERT, AUDIT_ENTRY, RECEIPT, SNAPSHOT
from gpumond.store.audit import AuditEntry
from gpumond.tick.history import History
from tests.helpers.memory_store import MemoryStore
from tests.helpers.values import TickState, advance

FRAME = advance(TickState(), BUILT_IN, SNAPSHOT).frame


TOKEN = {"Authorization": "Bearer secret"}


class AuditedStore(MemoryStore):
    async def audit_entries(
        self, limit: int = 0, include_users: bool = True, operation: str | None = None
    ) -> list[AuditEntry]:
        return [AUDIT_ENTRY][:limit]


class View:
    def __init__(
        self,
        frame: Frame | None = FRAME,
        answer: FlushResponse | FlushError | None = None,
        history: History | None = None,
    ) -> None:
        self.started_at, self.store_file = 1.0, Path("/var/lib/gpumond/gpumond.db")
        self.nonstandard_runtime_dir: Path | None = None
        self.url: str | None = None
        self.agent_socket = Path("/run/gpumond/agent.sock")
        self.history = history or History()
        self.store, self.requests = AuditedStore(), self
        self.rulebook = RuleRegistry(Settings(), self.store)
        self.quotas = QuotaRegistry((), self.store)
        self.admissions = Admissions(self.flush, lambda: "user", lambda pid: None, lambda: 1.0, self.store)
        self.hook = AlertmanagerHook(self.flush, self.store, lambda: ("node7",), lambda: False)
        self.wrong_configuration = ""
        self.frame = frame
        self.answer = answer or FlushResponse("id", (RECEIPT,), RECEIPT.released_bytes)
        self.flush_requests: list[FlushRequest] = []
        self.requested_by: list[str] = []
        self.silences = Silences(self.store)
        self.events = EventLog(1.0)
        self.agent_requests: list[tuple[object, ...]] = []
        self.response: AgentResponse | None = None
        self._exposition = Exposition(Telemetry())
        self.responses: dict[str, bytes] = {}

    async def await_frame(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return False

    def receipts(self) -> list[Receipt]:
        return [RECEIPT]

    def config_hashes(self) -> ConfigHashes:
        return ConfigHashes("5d41402abc4b", "7d793037a076")

    async def metrics(self, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Scrape:
        return self._exposition.scrape(self.frame, ScrapeFormat.of(accept, compat, groups))

    def get(self, kind: type) -> Any:
        """Return the service of a feature; this object stands for those that have no state."""
        services = (self.rulebook, self.quotas, self.admissions, self.hook, self.silences)
        return next((service for service in services if kind in type(service).__mro__), self)

    def past(self) -> list[Alert]:
        return [as_resolved(ALERT, 2.0)]

    async def preview(self, rule: Rule) -> Preview:
        return preview(rule, [pack_moment(SNAPSHOT, ())])

    async def reload(self, requested_by: str) -> str:
        if self.wrong_configuration:
            raise ConfigError(self.wrong_configuration)
        return "reloaded"

    async def flush(self, request: FlushRequest, requested_by: str) -> FlushResponse:
        self.flush_requests.append(request)
        self.requested_by.append(requested_by)
        if isinstance(self.answer, FlushError):
            raise self.answer
        return self.answer

    async def ask(
        self,
        pid: int,
        kind: RequestKind,
        limit_bytes: int | None,
        device: str | None,
        requested_by: str,
        record_seconds: float | None = None,
    ) -> AgentResponse | None:
        self.agent_requests.append((pid, kind, limit_bytes, device))
        return self.response

    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest:
        return EXAMPLE

    async def fetch(self, pid: int, snapshot_id: int, requested_by: str) -> AgentResponse | None:
        return AgentResponse("id", f"snapshot {snapshot_id} doesn't exist; available: none")

    async def detach(self, seconds: float, requested_by: str) -> tuple[float, bool]:
        return 1.0 + seconds, seconds < 100


@cache
def application() -> FastAPI:
    """Application whose state a test replaces, because its routes take long to make."""
    return create_app(State(), routers())


def serving(view: Any, tokens: Tokens | None = None) -> FastAPI:
    """Return the application with this view, until the next call."""
    app = application()
    app.state = app_state(view, tokens or Tokens("secret"))
    return app


def ask(view: View, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    app = serving(view)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


HOG: dict[str, Any] = {"name": "hog", "scope": "process", "value": "used_bytes", "above": "40GiB", "for": "5m"}
