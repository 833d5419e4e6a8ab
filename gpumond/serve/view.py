"""Interface of the daemon that the API uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpumond.config.settings import Compat
from gpumond.facts.flush import FlushOutcome, FlushRequest
from gpumond.facts.frame import Alert, Frame
from gpumond.facts.messages import AgentResponse, Asked
from gpumond.facts.pools import Receipt
from gpumond.facts.rule import Rule
from gpumond.features.alerts.receiver_check import ReceiverTest
from gpumond.features.baselines.recordings import BaselineService
from gpumond.features.flush.hook import AlertmanagerHook
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.registry import QuotaRegistry
from gpumond.features.rules.preview import Preview
from gpumond.features.rules.registry import RuleRegistry
from gpumond.features.silences.silences import Silences
from gpumond.metrics.exposition import Group
from gpumond.serve.event_log import EventLog
from gpumond.store.audit import AuditEntry
from gpumond.tick.history import History

if TYPE_CHECKING:
    from fastapi import Request


class MetricsPage(Protocol):
    @property
    def content_type(self) -> str: ...
    @property
    def plain(self) -> bytes: ...
    @property
    def compressed(self) -> bytes: ...


class DaemonView(Protocol):
    """The attributes and methods of the daemon that the API uses."""

    started_at: float
    store_file: Path
    rulebook: RuleRegistry
    events: EventLog
    baselines: BaselineService
    silences: Silences
    quotas: QuotaRegistry
    admissions: Admissions
    hook: AlertmanagerHook

    @property
    def answers(self) -> dict[str, bytes]:
        """Encoded answers about the current frame, by route; empty with each new frame."""
        ...

    @property
    def frame(self) -> Frame | None: ...
    async def await_frame(self, seconds: float) -> bool:
        """Wait for the next frame. Returns False if none is taken in time."""
        ...

    def receipts(self) -> Sequence[Receipt]: ...
    @property
    def history(self) -> History: ...
    def past_alerts(self) -> Sequence[Alert]: ...
    async def audit_entries(self, limit: int) -> list[AuditEntry]: ...
    async def preview(self, rule: Rule) -> Preview: ...
    async def test_receiver(self, name: str, requested_by: str) -> ReceiverTest: ...
    async def reload(self, requested_by: str) -> str: ...
    async def metrics(self, accept: str, compat: Compat | None, groups: frozenset[Group]) -> MetricsPage: ...
    async def flush(self, request: FlushRequest, requested_by: str) -> FlushOutcome: ...
    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]: ...
    async def ask(
        self,
        pid: int,
        kind: Asked,
        limit_bytes: int | None,
        device: str | None,
        requested_by: str,
        record_seconds: float | None = None,
    ) -> AgentResponse | None: ...
    async def fetch(
        self, pid: int, snapshot_id: int, requested_by: str
    ) -> tuple[int, AsyncGenerator[bytes, None]] | AgentResponse | None:
        """Return size and bytes of a snapshot's file, the program's refusal, or None without an answer in time."""
        ...


def view_of(request: Request) -> DaemonView:
    """Return the daemon of this application, typed: attributes of ``app.state`` are not."""
    view: DaemonView = request.app.state.view
    return view
