"""Who may change something: whoever shows a token with the scope for it, or comes over the daemon's Unix socket.

On that socket the kernel says who it is: the daemon's own user and root may do everything, another user may flush his
own programs and nothing else.
"""

from __future__ import annotations

import hmac
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from fastapi.security import HTTPBearer

from gpumond.api.rate_limits import FAILURES_PER_MINUTE, FLUSHES_PER_MINUTE, TokenBucket
from gpumond.api.shares import user_of
from gpumond.config.tokens import Token, digest

bearer = HTTPBearer(
    auto_error=False,
    description="The token in the file `token` of its runtime directory, or one of `tokens_file` with the scope.",
)
HOW = (
    "this changes something and wants `Authorization: Bearer TOKEN`; the daemon leaves a token for its own user in the "
    "file `token` of its runtime directory, others are made in `tokens_file`"
)
OVERFLOW_UID = 65534
"""A user that this user namespace does not know: anybody."""


@dataclass(frozen=True, slots=True)
class Caller:
    """``name`` is for receipts and the audit. ``uid``: may flush the programs of that user alone."""

    name: str
    scopes: frozenset[str]
    uid: int | None = None

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class Tokens:
    """Bearer tokens, kept as hashes. ``own`` may do everything; ``others`` are those of the file as it is now."""

    def __init__(
        self,
        *own: str,
        others: Callable[[], Sequence[Token]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = [Token("token", frozenset({"admin"}), digest(token)) for token in own]
        self._others, self.clock = others, clock
        self.failures = TokenBucket(FAILURES_PER_MINUTE, 60.0)
        self.flushes = TokenBucket(FLUSHES_PER_MINUTE, 60.0)

    def caller(self, token: str) -> Caller | None:
        shown = digest(token)
        # Every entry is compared, so that the time taken tells nothing.
        found = [entry for entry in (*self._own, *self._others()) if hmac.compare_digest(shown, entry.digest)]
        if not found:
            return None
        entry = found[0]
        name = "token" if entry in self._own else f"token:{entry.name}"
        return Caller(name, entry.scopes | {"read"})


def authenticate(tokens: Tokens, scope: Mapping[str, Any]) -> Caller | None:
    """Who asks, from an ASGI scope: by a token, else by the kernel's word on a Unix socket.

    A wrong token is a 401, and from the eleventh a minute of one user on a 429; a right one is never held up.
    """
    token = bearer_token(scope)
    uid: int | None = (scope.get("state") or {}).get("uid")
    if token is None:
        return None if uid is None else of_user(uid)
    caller = tokens.caller(token)
    if caller is None:
        failed(tokens, user(scope))
        raise HTTPException(401, "the token is wrong, or no longer holds", {"WWW-Authenticate": "Bearer"})
    return caller


def of_user(uid: int) -> Caller | None:
    if uid in (0, os.geteuid()):
        return Caller(f"uid:{uid}", frozenset({"admin"}))
    if uid == OVERFLOW_UID:
        return None
    return Caller(f"uid:{uid}", frozenset({"read", "flush"}), uid)


def bearer_token(scope: Mapping[str, Any]) -> str | None:
    kind, _, token = header(scope["headers"], b"authorization").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The first of that name, or nothing."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def user(scope: Mapping[str, Any]) -> str:
    """The user that a request counts for (``gpumond.api.shares``). It identifies nobody who may change something."""
    state, client = scope.get("state") or {}, scope.get("client")
    found: str = state.get("user") or user_of(state.get("uid"), str(client[0]) if client else "")
    return found


def failed(tokens: Tokens, who: str) -> None:
    """Counts a failure. Raises the 429 if there were too many before."""
    now = tokens.clock()
    admit(tokens.failures, who, now, "too many wrong tokens or passwords")
    tokens.failures.count(who, now)


def admit(rate: TokenBucket, who: str, now: float, refusal: str) -> None:
    if (wait := rate.wait(who, now)) > 0:
        seconds = math.ceil(wait)
        raise HTTPException(429, f"{refusal}; again in {seconds} s", {"Retry-After": str(seconds)})


def caller_with(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """FastAPI dependency: the caller, or 401 if nobody says who asks, 403 if he may not."""

    async def require(request: Request) -> Caller:
        caller = authenticate(request.app.state.tokens, request.scope)
        if caller is None:
            raise HTTPException(401, HOW, {"WWW-Authenticate": "Bearer"})
        if not caller.may(scope):
            challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
            raise HTTPException(403, f"{caller.name} has no scope {scope}", {"WWW-Authenticate": challenge})
        return caller

    return require


def name_with(scope: str) -> Callable[[Request], Awaitable[str]]:
    """The same, for routes that need only the caller's name."""
    require = caller_with(scope)

    async def name(request: Request) -> str:
        return (await require(request)).name

    return name


require_token = name_with("admin")
require_rules = name_with("rules")
require_flush = caller_with("flush")
