"""Checks of every request before routing: Host, origin, body, rate limit, and permission to read.

A web page of another origin can make a local browser send requests to 127.0.0.1 and, by DNS rebinding, read the
responses. The Host header must therefore match a name or address of this daemon exactly, and requests that change state
are accepted from no other origin than the daemon's own page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumond.config.web_file import WebSettings
from gpumond.facts.flush import OPERATION_ID
from gpumond.serve.authentication import Tokens, authenticate, counted_user, header
from gpumond.serve.authorization import ALWAYS_OPEN_PATHS, RESERVED_PATHS, SAFE_METHODS, ReadAccess, check_tenant
from gpumond.serve.http import UnsentResponses, in_pieces, without_body
from gpumond.serve.identity import IdentityHeaders
from gpumond.serve.limits import (
    CHANGES_AT_ONCE,
    CHANGES_PER_SECOND,
    MAX_BODY_BYTES,
    RequestSlots,
    TokenBucket,
    body_too_large,
    limited_body,
    parse_address,
)
from gpumond.serve.responses import problem
from gpumond.store.audit import CURRENT_OPERATION_ID

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
CHARSET = re.compile(r"charset\s*=\s*\"?([^\s\";]*)")
OPERATION_HEADER = b"gpumond-operation"
"""Header with the id of the operation on several machines that a request belongs to."""
STRICT_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Access policy.

    ``hosts``: names in lower case, without port; the address of the connection is always accepted. ``open_reads``:
    reading requires no token, unless ``web`` defines users. ``web``: returns the current web configuration.
    ``identities``: the proxy whose headers state who sends a request; None: headers of all peers are ignored.
    """

    hosts: frozenset[str] = frozenset(("localhost", "127.0.0.1", "::1"))
    open_reads: bool = True
    web: Callable[[], WebSettings] = WebSettings
    identities: IdentityHeaders | None = None
    count_rejection: Callable[[str], None] = field(default=lambda reason: None)


class Guard:
    """ASGI middleware around the whole application, so it applies to every route and every error."""

    def __init__(self, app: ASGIApp, tokens: Tokens, policy: Policy) -> None:
        self._app, self._tokens, self._policy = app, tokens, policy
        self._hosts = frozenset(map(_normalize_host, policy.hosts))
        self._read_access = ReadAccess(tokens, policy.open_reads)
        self._slots, self._unsent = RequestSlots(), UnsentResponses()
        self._change_rate = TokenBucket(CHANGES_AT_ONCE, CHANGES_AT_ONCE / CHANGES_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket: not accepted
        send = self._with_headers(send)
        if scope["method"] == "HEAD":  # handled as GET
            scope, send = {**scope, "method": "GET"}, without_body(send)
        else:
            send = in_pieces(scope, send, self._unsent)
        # uvicorn cancels what is left when the daemon ends, after all connections are closed, and would log each error.
        with suppress(asyncio.CancelledError):
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope = await self._identify(scope)
            await self._check_request(scope)
            release_slot = await self._take_slot(scope)
        except HTTPException as error:
            self._policy.count_rejection(REJECTION_REASONS.get(error.status_code, "other"))
            await problem(error.status_code, str(error.detail), error.headers)(scope, receive, send)
            return

        async def send_and_release(message: Message) -> None:
            release_slot()  # sending takes no slot
            await send(message)

        CURRENT_OPERATION_ID.set(header(scope["headers"], OPERATION_HEADER))  # a request has a context of its own
        try:
            await self._app(scope, limited_body(receive), send_and_release)
        finally:
            release_slot()

    async def _identify(self, scope: Scope) -> Scope:
        """Return the scope with the identity that the declared proxy states, if it sends the request.

        ``subjects`` are those of the identity. ``tenant``: it has no scope, and sees its own programs only. Raises 403
        for what is not for tenants.
        """
        identities = self._policy.identities
        if identities is None or scope["path"] in ALWAYS_OPEN_PATHS:
            return scope
        identity = identities.identity(scope)
        if identity is None:
            return scope
        state = {
            **scope["state"],
            "user": f"proxy:{identity.name}",
            "subjects": identity.subjects,
            "identity": identity,
        }
        scope = {**scope, "state": state}
        if await authenticate(self._tokens, scope) is None:
            check_tenant(scope, identity)
            state["tenant"] = identities.tenant(identity)
        return scope

    async def _take_slot(self, scope: Scope) -> Callable[[], None]:
        """Take one of the user's slots for concurrent reads. Other requests may take minutes: they use no slot, and
        begin at a limited rate."""
        if scope["path"] in ALWAYS_OPEN_PATHS:
            return _do_nothing
        if scope["method"] in SAFE_METHODS:
            return await self._slots.take((counted_user(scope), scope["path"] in RESERVED_PATHS))
        user, now = counted_user(scope), asyncio.get_running_loop().time()
        wait_seconds = self._change_rate.wait_seconds(user, now)
        self._change_rate.spend(user, now)
        if wait_seconds:
            await asyncio.sleep(wait_seconds)
        return _do_nothing

    async def _check_request(self, scope: Scope) -> None:
        web = self._policy.web()
        if (scope.get("state") or {}).get("reserved") and scope["path"] not in RESERVED_PATHS:
            detail = "too many connections; the remaining ones are reserved for /metrics and /-/healthy"
            raise HTTPException(503, detail, {"Retry-After": "1", "Connection": "close"})
        host = _host(scope)
        if host not in self._hosts and host != _connection_address(scope):
            raise HTTPException(421, f"{host} isn't a name of this daemon; add it to `hosts` in the configuration")
        if (operation := header(scope["headers"], OPERATION_HEADER)) and not re.match(OPERATION_ID, operation):
            raise HTTPException(400, "Gpumond-Operation: expected 1 to 64 characters from A-Z, a-z, 0-9, ., _ and -")
        if scope["method"] not in SAFE_METHODS:
            _check_origin(scope)
            _check_body(scope)
        length = header(scope["headers"], b"content-length")
        if length and int(length) > MAX_BODY_BYTES:
            raise body_too_large()
        await self._read_access.check(scope, web)

    def _with_headers(self, send: Send) -> Send:
        defaults = {**SECURITY_HEADERS, "content-security-policy": STRICT_POLICY}
        configured = {name.lower(): value for name, value in self._policy.web().headers}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.decode("latin-1").lower(), name, value) for name, value in message.get("headers", ())]
                names = {name for name, _, _ in headers}
                added = {name: value for name, value in defaults.items() if name not in names} | configured
                message = {
                    **message,
                    "headers": [
                        *((name, value) for lower, name, value in headers if lower not in configured),
                        *((name.encode(), value.encode()) for name, value in added.items()),
                    ],
                }
            await send(message)

        return send_with_headers


REJECTION_REASONS = {
    400: "host",
    401: "credentials",
    403: "origin",
    413: "oversize",
    415: "media_type",
    421: "host",
    429: "rate",
    503: "busy",
}


def _do_nothing() -> None:
    pass


def _host(scope: Mapping[str, Any]) -> str:
    """Return the host of the Host header, without port. The request target is ignored."""
    hosts = [value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == b"host"]
    match = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None:
        raise HTTPException(400, "expected exactly one Host header with a name or an address", {"Connection": "close"})
    return _normalize_host(match[1].strip("[]"))


def _connection_address(scope: Mapping[str, Any]) -> str | None:
    """Return the address that the connection was made to. A request that names it does not depend on DNS."""
    server = scope.get("server")
    return _normalize_host(str(server[0])) if server and server[1] is not None else None


def _normalize_host(host: str) -> str:
    return str(parse_address(host) or host)


def _check_origin(scope: Mapping[str, Any]) -> None:
    origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
    scheme = scope["scheme"]
    if "identity" in (scope.get("state") or {}):  # the proxy may terminate TLS
        scheme = header(scope["headers"], b"x-forwarded-proto").lower() or scheme
    own_origin = f"{scheme}://{header(scope['headers'], b'host').strip().lower()}"
    if origins not in ([], [own_origin]):
        raise HTTPException(403, "requests from other origins may not modify state")


def _check_body(scope: Mapping[str, Any]) -> None:
    """Require JSON. Browsers send forms and plain text across origins without a preflight request, but not JSON."""
    has_body = header(scope["headers"], b"content-length") not in ("", "0") or any(
        name == b"transfer-encoding" for name, _ in scope["headers"]
    )
    content_types = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    media_type, _, parameters = (content_types or [""])[0].lower().partition(";")
    charset = CHARSET.search(parameters)
    if (has_body or content_types) and (len(content_types) != 1 or media_type.strip() != "application/json"):
        raise HTTPException(415, "expected exactly one Content-Type header: application/json")
    if charset and charset[1] not in ("utf-8", "us-ascii"):
        raise HTTPException(415, f"expected JSON in UTF-8, not in {charset[1]}")
