"""Authorization of requests: who may read, and the scope that a change requires."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from gpumond.config.web_file import WebSettings
from gpumond.host.peer import rate_limit_name
from gpumond.serve.authentication import (
    SESSIONS_ROUTE,
    Caller,
    Passwords,
    Tokens,
    authenticate,
    count_failure,
    counted_user,
    header,
)
from gpumond.serve.identity import FRAME_ROUTE_NAMES, Identity
from gpumond.serve.responses import LIVENESS_PATHS, READINESS_PATHS

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ALWAYS_OPEN_PATHS = (*LIVENESS_PATHS, *READINESS_PATHS)
"""Paths for probes, which send no credentials. They reveal whether devices can be read, and the cause of a failure."""

RESERVED_PATHS = ("/metrics", *ALWAYS_OPEN_PATHS)
"""Paths that are served regardless of load, so monitoring continues."""

FRAME_ROUTES = frozenset(f"/api/v1/{name}" for name in FRAME_ROUTE_NAMES)
TOKEN_REQUIRED = (
    "a change needs the `Authorization: Bearer TOKEN` header; use the token in the file `token` of the runtime "
    "directory, which the daemon's user can read, or one from `tokens_file`"
)


class ReadAccess:
    """Who may read. ``open_reads``: reading requires no token, unless the web configuration defines users."""

    def __init__(self, tokens: Tokens, open_reads: bool) -> None:
        self._tokens, self._open_reads = tokens, open_reads
        self._passwords = Passwords(tokens)

    async def check(self, scope: Mapping[str, Any], web: WebSettings) -> None:
        """Raise 401 for a request that requires credentials and has none, and 429 after too many wrong ones."""
        if (self._open_reads or web.requires_certificate) and not web.users:
            return
        if _is_open(scope["path"], web) or "identity" in (scope.get("state") or {}):
            return  # the proxy has authenticated an identity
        scheme, _, credentials = header(scope["headers"], b"authorization").partition(" ")
        if scheme.lower() == "basic" and web.users:
            if await self._passwords.verify(web.users, credentials, counted_user(scope)):
                return
            count_failure(self._tokens, counted_user(scope))
        elif await authenticate(self._tokens, scope) is not None:
            return
        challenge = 'Basic realm="gpumond", charset="UTF-8"' if web.users else "Bearer"
        accepted = "a user name and password, or a token" if web.users else "a token"
        raise HTTPException(401, f"authentication is required: send {accepted}", {"WWW-Authenticate": challenge})


def _is_open(path: str, web: WebSettings) -> bool:
    """Return True if a path requires no credentials: those of probes, and those to sign in, unless users have
    passwords."""
    if web.users or path in RESERVED_PATHS:
        return path in ALWAYS_OPEN_PATHS
    from gpumond.page.files import PAGE  # a daemon that only Prometheus reads does not need the memory of the page

    return path in PAGE or path == SESSIONS_ROUTE


def check_tenant(scope: Mapping[str, Any], identity: Identity) -> None:
    """Raise 403 if an identity without scopes requests something else than the web UI, the documents, and the routes
    that contain nothing but a frame."""
    from gpumond.page.files import PAGE

    path = scope["path"]
    is_for_tenants = path in PAGE or path.startswith("/docs") or path == "/openapi.json" or path in FRAME_ROUTES
    if scope["method"] not in SAFE_METHODS or not is_for_tenants:
        raise HTTPException(
            403,
            f"{identity.name} can see only their own programs and can't change anything; to allow more, add a line "
            f"with user:{identity.name} to tokens_file",
        )


def caller_with(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """Return a FastAPI dependency for the caller. It raises 401 without credentials, and 403 without the scope."""

    async def require(request: Request) -> Caller:
        caller = await authenticate(request.app.state.tokens, request.scope)
        if caller is None:
            raise HTTPException(401, TOKEN_REQUIRED, {"WWW-Authenticate": "Bearer"})
        if not caller.may(scope):
            challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
            is_user = caller.name.startswith("uid:")
            remedy = (
                "ask an administrator, or use a token that has it" if is_user else "add it to its line in tokens_file"
            )
            detail = f"{rate_limit_name(caller.name)} lacks the `{scope}` scope; {remedy}"
            raise HTTPException(403, detail, {"WWW-Authenticate": challenge})
        return caller

    return require


def require_scope(scope: str) -> Callable[[Request], Awaitable[str]]:
    """Return a FastAPI dependency for the caller's name; otherwise like ``caller_with``."""
    require = caller_with(scope)

    async def name(request: Request) -> str:
        return (await require(request)).name

    return name


async def require_owner_or_admin(request: Request) -> Caller:
    """Return an administrator, who may change all programs, or the user to whose own programs a change is limited.

    This is a FastAPI dependency. It raises 401 without credentials, and 403 for a token without the scope.
    """
    caller = await caller_with("flush")(request)
    return caller if caller.uid is not None else await caller_with("admin")(request)


require_admin = require_scope("admin")
require_rules = require_scope("rules")
require_flush = caller_with("flush")
