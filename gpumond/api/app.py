"""The HTTP face: an ASGI application over one View. Nothing here touches the driver, /proc or the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, Protocol

from fastapi import FastAPI

from gpumond import __version__
from gpumond.api import (
    agents,
    baselines,
    document,
    events,
    facts,
    flushes,
    history,
    operation,
    page,
    problems,
    release,
    rules,
)
from gpumond.api.auth import Tokens
from gpumond.audit import AuditEntry
from gpumond.flush import FlushAnswer, FlushRequest
from gpumond.history import History
from gpumond.measurements import Measurements
from gpumond.model import Alert, Frame, Receipt
from gpumond.ring import Ring
from gpumond.rules import Rule
from gpumond.rules.book import RuleBook
from gpumond.rules.preview import Preview
from gpumond.shares import Shares
from gpumond.wire import Answer, Asked

DESCRIPTION = (
    "GPU memory, every byte attributed, and given back with a receipt. Bytes are integers, times unix seconds, "
    "unknown is null. Errors are RFC 9457 problem documents."
)


class MetricsPage(Protocol):
    @property
    def content_type(self) -> str: ...
    @property
    def plain(self) -> bytes: ...
    @property
    def compressed(self) -> bytes: ...


class View(Protocol):
    """What the HTTP face needs of the daemon."""

    started_at: float
    rulebook: RuleBook
    events: Ring
    baselines: Measurements
    answers: dict[str, bytes]
    """Of the current frame, by route, as they were first asked for; empty with each new frame."""

    @property
    def frame(self) -> Frame | None: ...
    def receipts(self) -> Sequence[Receipt]: ...
    @property
    def history(self) -> History: ...
    def past_alerts(self) -> Sequence[Alert]: ...
    async def audit_entries(self, limit: int) -> list[AuditEntry]: ...
    async def preview(self, rule: Rule) -> Preview: ...
    async def reload(self, requested_by: str) -> str: ...
    async def metrics(self, accept: str, compat: Literal["dcgm"] | None) -> MetricsPage: ...
    async def flush(self, request: FlushRequest, requested_by: str) -> FlushAnswer: ...
    async def release(self, seconds: float, requested_by: str) -> tuple[float, bool]: ...
    async def ask(
        self, pid: int, kind: Asked, limit_bytes: int | None, device: str | None, requested_by: str
    ) -> Answer | None: ...


Lifespan = Callable[[], AbstractAsyncContextManager[None]]


def create_app(view: View, tokens: Tokens, lifespan: Lifespan) -> FastAPI:
    """The application; ``lifespan`` starts and stops what the view lives on."""

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan():
            yield

    app = FastAPI(
        title="gpumond", version=__version__, description=DESCRIPTION, lifespan=live, docs_url=None, redoc_url=None
    )
    app.state.view = view
    app.state.tokens = tokens
    app.state.event_streams = Shares(events.MAX_STREAMS)
    app.state.previews = Shares(rules.MAX_PREVIEWS, 1)
    app.state.slow_seconds = events.SLOW_SECONDS
    problems.install(app)
    document.install(app)
    app.include_router(page.router)
    app.include_router(operation.router)
    app.include_router(facts.router, prefix="/api/v1")
    app.include_router(history.router, prefix="/api/v1")
    app.include_router(flushes.router, prefix="/api/v1")
    app.include_router(rules.router, prefix="/api/v1")
    app.include_router(release.router, prefix="/api/v1")
    app.include_router(baselines.router, prefix="/api/v1")
    app.include_router(events.router, prefix="/api/v1")
    app.include_router(agents.router, prefix="/api/v1")
    return app
