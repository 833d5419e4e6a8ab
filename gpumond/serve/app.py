"""The ASGI application over one core. It accesses neither the driver, /proc nor the disk."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import State

from gpumond import __version__
from gpumond.core import Core
from gpumond.serve import live, operations, pages, resources, routes, sessions
from gpumond.serve.authentication import Tokens
from gpumond.serve.limits import MAX_PREVIEWS, SharedResource
from gpumond.serve.live import MAX_STREAMS, READER_TIMEOUT_SECONDS, FrameStream
from gpumond.serve.routes import BODY_TYPE_KEY, problem_responses

DESCRIPTION = (
    "GPU memory accounting, alerts and flushes with a receipt. Bytes are integers, times are Unix seconds, "
    "unknown is null. Errors are RFC 9457 problem documents."
)


def create_app(state: State, routers: Iterable[APIRouter] = ()) -> FastAPI:
    """Return the application. ``state``: that of ``app_state``."""
    all_routers = (*CORE_ROUTERS, *routers)
    app = FastAPI(docs_url=None, redoc_url=None)
    app.state = state
    routes.install_error_handlers(app)
    app.openapi = cache(partial(openapi_document, all_routers))  # type: ignore[method-assign]
    for router in all_routers:
        app.include_router(router)
    return app


CORE_ROUTERS = (
    resources.router,
    live.router,
    operations.router,
    sessions.router,
    pages.router,
)

BODY_PROBLEMS = (400, 413, 415)
TOKEN_PROBLEMS = (401, 403, 429)
PARAMETER_PROBLEMS = (422,)
UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")
"""Schemas that FastAPI documents for 422 and that are not used in responses."""


def openapi_document(routers: Iterable[APIRouter]) -> dict[str, Any]:
    """Return the OpenAPI document, with the problems that apply to all routes with a body, a token or parameters."""
    documented = FastAPI(title="gpumond", version=__version__, description=DESCRIPTION)
    for router in routers:
        for route in router.routes:
            for response in route.responses.values() if isinstance(route, APIRoute) else ():
                if BODY_TYPE_KEY in response:
                    response["model"] = response.pop(BODY_TYPE_KEY)
        documented.include_router(router)
    document = documented.openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            _add_common_problems(operation)
    for name in UNUSED_SCHEMAS:
        document["components"]["schemas"].pop(name, None)
    return document


def _add_common_problems(operation: dict[str, Any]) -> None:
    body, token = "requestBody" in operation, "security" in operation
    refusals = (*(BODY_PROBLEMS if body else ()), *(TOKEN_PROBLEMS if token else ()))
    if body or "parameters" in operation:
        refusals += PARAMETER_PROBLEMS
    for status, response in problem_responses(*refusals).items():
        operation["responses"][str(status)] = response


def app_state(core: Core, tokens: Tokens) -> State:
    return State(
        {
            "core": core,
            "tokens": tokens,
            "live": FrameStream(core),
            "event_streams": SharedResource(MAX_STREAMS),
            "previews": SharedResource(MAX_PREVIEWS, 1),
            "reader_timeout_seconds": READER_TIMEOUT_SECONDS,
        }
    )
