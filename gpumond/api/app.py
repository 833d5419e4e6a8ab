"""The HTTP face: an ASGI application over one View. Nothing here touches the driver, /proc or the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from gpumond import __version__
from gpumond.api import (
    agents,
    baselines,
    events,
    flushes,
    history,
    openapi,
    operations,
    page,
    problems,
    release,
    resources,
    rules,
)
from gpumond.api.auth import Tokens
from gpumond.api.shares import Shares
from gpumond.api.view import DaemonView

DESCRIPTION = (
    "GPU memory, every byte attributed, and given back with a receipt. Bytes are integers, times unix seconds, "
    "unknown is null. Errors are RFC 9457 problem documents."
)


Lifespan = Callable[[], AbstractAsyncContextManager[None]]


def create_app(view: DaemonView, tokens: Tokens, lifespan: Lifespan) -> FastAPI:
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
    openapi.install(app)
    app.include_router(page.router)
    app.include_router(operations.router)
    app.include_router(resources.router, prefix="/api/v1")
    app.include_router(history.router, prefix="/api/v1")
    app.include_router(flushes.router, prefix="/api/v1")
    app.include_router(rules.router, prefix="/api/v1")
    app.include_router(release.router, prefix="/api/v1")
    app.include_router(baselines.router, prefix="/api/v1")
    app.include_router(events.router, prefix="/api/v1")
    app.include_router(agents.router, prefix="/api/v1")
    return app
