"""FastAPI's dependencies of routes that require a caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBearer

from gpumond.facts.frame import Frame
from gpumond.kernel import Kernel
from gpumond.serve.auth import Caller, authenticate


def kernel_of(request: Request) -> Kernel:
    """Return the daemon's kernel, typed: attributes of ``app.state`` are not."""
    kernel: Kernel = request.app.state.kernel
    return kernel


def present(frame: Frame | None) -> Frame:
    """Return the frame. Raises 503 before the first one."""
    if frame is None:
        raise starting()
    return frame


def starting() -> HTTPException:
    """Return the error of a request before the first reading."""
    return HTTPException(503, "the first reading is in progress; retry in a second", {"Retry-After": "1"})


bearer = HTTPBearer(
    auto_error=False,
    description="The token in the file `token` of the daemon's runtime directory, a token of `tokens_file` that has "
    "the required scope, or that of a Kubernetes service account which `tokens_file` names.",
)
CHANGES = [Depends(bearer)]
"""Dependencies of routes that modify state."""
TOKEN_REQUIRED = (
    "a change needs the header `Authorization: Bearer TOKEN`; the daemon's user finds a token in the file `token` of "
    "the runtime directory, and `tokens_file` defines others"
)


def caller_with(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """Return a FastAPI dependency for the caller. It raises 401 without credentials, and 403 without the scope."""

    async def require(request: Request) -> Caller:
        caller = await authenticate(request.app.state.tokens, request.scope)
        if caller is None:
            raise HTTPException(401, TOKEN_REQUIRED, {"WWW-Authenticate": "Bearer"})
        if not caller.may(scope):
            challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
            raise HTTPException(403, f"{caller.name} doesn't have the scope {scope}", {"WWW-Authenticate": challenge})
        return caller

    return require


def name_with(scope: str) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency for the caller's name; otherwise like ``caller_with``."""
    require = caller_with(scope)

    async def name(request: Request) -> str:
        return (await require(request)).name

    return name


require_token = name_with("admin")
require_rules = name_with("rules")
require_flush = caller_with("flush")


def etag_of(if_match: str | None) -> str | None:
    return None if if_match in (None, "*") else if_match.strip().removeprefix("W/").strip('"')
