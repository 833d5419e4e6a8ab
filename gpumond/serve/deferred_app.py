"""The ASGI application of the daemon. It imports FastAPI and the routes when one of them is first requested.

Their import takes half a second, in which a daemon reads no device. Metrics without parameters and probes are answered
before it, by the functions that their routes call.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumond.core import Core
from gpumond.host.tasks import background_task
from gpumond.serve import responses
from gpumond.serve.authentication import Tokens, header

if TYPE_CHECKING:
    from fastapi import APIRouter


class DeferredApp:
    """``lifespan`` starts and stops the daemon. ``routers`` imports those of the features."""

    def __init__(
        self,
        core: Core,
        tokens: Tokens,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        routers: Callable[[], Iterable[APIRouter]] = tuple,
    ) -> None:
        self._core, self._tokens, self._lifespan, self._routers = core, tokens, lifespan, routers
        self._app: ASGIApp | None = None
        self._tasks = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif self._app is None and (response := await self._early_response(scope)) is not None:
            await response(scope, receive, send)
        else:
            app = await self._application()
            await app(scope, receive, send)

    async def _early_response(self, scope: Scope) -> Response | None:
        """Answer a probe or a scrape without parameters. Returns None for any other request."""
        path = scope["path"]
        if scope["method"] != "GET" or scope["query_string"]:
            return None
        if path in responses.LIVENESS_PATHS:
            return responses.healthy()
        if path in responses.READINESS_PATHS:
            return responses.ready(self._core.frame)
        if path == responses.METRICS_PATH:
            accept, encoding = (header(scope["headers"], name) for name in (b"accept", b"accept-encoding"))
            return await responses.metrics(self._core, accept, encoding)
        return None

    async def _application(self) -> ASGIApp:
        """Return the application of FastAPI. Its first import blocks the event loop for about half a second."""
        if self._app is None:
            from gpumond.serve.app import app_state, create_app

            state = app_state(self._core, self._tokens)
            self._app = create_app(state, self._routers())
            await self._tasks.enter_async_context(background_task(state.live.run()))
        return self._app

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        """Run the daemon from the message of the start to that of the shutdown."""
        phase = "startup"
        await receive()
        try:
            async with self._lifespan(), self._tasks:
                await send({"type": "lifespan.startup.complete"})
                phase = "shutdown"
                await receive()
        except BaseException:
            await send({"type": f"lifespan.{phase}.failed", "message": traceback.format_exc()})
            raise
        await send({"type": "lifespan.shutdown.complete"})
