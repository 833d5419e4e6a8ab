"""The ASGI application of the daemon, which imports most of its routes when one of them is first requested.

FastAPI, the models of the routes and the page need most of the time at the start and a quarter of the memory, and a
daemon that only Prometheus reads uses none of them. Metrics and probes are answered without them, and the page and its
stream of frames without FastAPI.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumond.host.event_loop import background
from gpumond.kernel import Kernel
from gpumond.serve.auth import Tokens
from gpumond.serve.monitoring import INTERNAL_ERROR, monitored, refusal

if TYPE_CHECKING:
    from starlette.datastructures import State


class DeferredApi:
    """``lifespan`` starts and stops the parts that the kernel has."""

    def __init__(
        self,
        kernel: Kernel,
        tokens: Tokens,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        self._kernel, self._tokens, self._lifespan = kernel, tokens, lifespan
        self._api: ASGIApp | None = None
        self._state: State | None = None
        self._tasks = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        response: ASGIApp | None = None
        try:
            answer = await monitored(self._kernel, scope)
            if answer is None and scope["method"] == "GET":
                response = await self._page_answer(scope)
        except HTTPException as error:
            answer = refusal(error.status_code, str(error.detail), error.headers)
        except Exception:
            await refusal(500, INTERNAL_ERROR).send(send)
            raise
        if answer is not None:
            await answer.send(send)
            return
        response = response or await self._application()
        await response(scope, receive, send)

    async def _page_answer(self, scope: Scope) -> ASGIApp | None:
        from gpumond.page.answers import page_answer

        return page_answer(scope, await self._shared_state())

    async def _shared_state(self) -> State:
        """Return the state that all routes share."""
        if self._state is None:
            from gpumond.serve.app import state_of

            self._state = state_of(self._kernel, self._tokens)
            await self._tasks.enter_async_context(background(self._state.live.run()))
        return self._state

    async def _application(self) -> ASGIApp:
        """Return the application of FastAPI. Its import blocks the event loop for some tenths of a second, once.

        In a thread, the import takes seconds while the loop is busy, and requests wait for it beyond a shutdown.
        """
        state = await self._shared_state()
        if self._api is None:
            from gpumond.serve.app import create_app

            self._api = create_app(self._kernel, self._tokens, nullcontext, state)
        return self._api

    async def _live(self, receive: Receive, send: Send) -> None:
        """Run the parts from the message of the start to that of the shutdown."""
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
