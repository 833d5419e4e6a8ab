"""The HTTP face: an ASGI application over one View. Nothing here touches the driver, /proc or the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from gpumond import __version__
from gpumond.api import (
    agents,
    baselines,
    events,
    flushes,
    history,
    operations,
    page,
    problems,
    resources,
    rules,
)
from gpumond.api.auth import Tokens
from gpumond.api.problems import responses
from gpumond.api.shares import Shares
from gpumond.api.view import DaemonView

DESCRIPTION = (
    "GPU memory, every byte attributed, and given back with a receipt. Bytes are integers, times unix seconds, "
    "unknown is null. Errors are RFC 9457 problem documents."
)


AT_THE_ROOT = (page, operations)
IN_THE_API = (resources, history, flushes, rules, baselines, events, agents)
"""Modules with a ``router``, in the order of the reference."""

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
    complete_openapi(app)
    for module in AT_THE_ROOT:
        app.include_router(module.router)
    for module in IN_THE_API:
        app.include_router(module.router, prefix="/api/v1")
    return app


BODY_PROBLEMS = (400, 413, 415)
TOKEN_PROBLEMS = (401, 403, 429)
PARAMETER_PROBLEMS = (422,)
UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
"""Schemas that FastAPI documents for 422 and that are not used in responses."""


def complete_openapi(app: FastAPI) -> None:
    """Add the problems that apply to all routes with a body, a token or parameters."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            for methods in document["paths"].values():
                for operation in methods.values():
                    _complete(operation)
            for name in UNUSED_SCHEMAS:
                document["components"]["schemas"].pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any]) -> None:
    body, token = "requestBody" in operation, "security" in operation
    refusals = (*(BODY_PROBLEMS if body else ()), *(TOKEN_PROBLEMS if token else ()))
    if body or "parameters" in operation:
        refusals += PARAMETER_PROBLEMS
    for status, response in responses(*refusals).items():
        operation["responses"][str(status)] = response
