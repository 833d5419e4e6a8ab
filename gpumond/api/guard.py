"""Before any route: is this request meant for us, may a browser have been made to send it, and may its sender read?

A page of a stranger can make a browser of this machine send requests to 127.0.0.1, and by DNS rebinding read the
answers. So the Host must be a name or an address of this daemon, exactly, and what changes something may come from no
other origin than our own page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumond.api.auth import Tokens, admit, authenticate, failed, header, user
from gpumond.api.basic_auth import Passwords
from gpumond.api.page import PAGE
from gpumond.api.problems import problem
from gpumond.api.rate_limits import (
    CHANGES_AT_ONCE,
    CHANGES_PER_SECOND,
    MAX_BODY_BYTES,
    Places,
    TokenBucket,
    bounded,
    too_large,
)
from gpumond.api.sending import in_pieces, without_body
from gpumond.api.unsent import Unsent
from gpumond.config.web import Web

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ALWAYS_OPEN = ("/-/healthy", "/-/ready")
"""For probes, which can show no credentials. They tell whether devices can be read, and of a failure the reason."""

RESERVED = ("/metrics", *ALWAYS_OPEN)
"""Are answered whatever else is being served, so that monitoring goes on."""

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
CHARSET = re.compile(r"charset\s*=\s*\"?([^\s\";]*)")
STRICT_POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """``hosts``: names, lower case, without port. The address that a connection came to is always one.

    ``open_reads``: no token is needed to read, unless ``web`` names users. ``web``: the web configuration as it is now.
    """

    hosts: frozenset[str] = frozenset(("localhost", "127.0.0.1", "::1"))
    open_reads: bool = True
    web: Callable[[], Web] = Web
    rejected: Callable[[str], None] = field(default=lambda reason: None)


class Guard:
    """ASGI middleware around everything, so that no route and no error escapes it."""

    def __init__(self, app: ASGIApp, tokens: Tokens, policy: Policy) -> None:
        self._app, self._tokens, self._policy = app, tokens, policy
        self._hosts = frozenset(map(_normal, policy.hosts))
        self._passwords = Passwords(tokens)
        self._rate, self._rate_of = TokenBucket(1, 1.0), (0.0, 1)
        self._places, self._unsent = Places(), Unsent()
        self._changes = TokenBucket(CHANGES_AT_ONCE, CHANGES_AT_ONCE / CHANGES_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a web socket: not accepted
        send = self._with_headers(send)
        if scope["method"] == "HEAD":  # as GET
            scope, send = {**scope, "method": "GET"}, without_body(send)
        else:
            send = in_pieces(scope, send, self._unsent)
        try:
            await self._check(scope)
            leave = await self._place(scope)
        except HTTPException as refusal:
            self._policy.rejected(REASONS.get(refusal.status_code, "other"))
            answer = problem(refusal.status_code, str(refusal.detail), dict(refusal.headers or {}))
            await answer(scope, receive, send)
            return

        async def send_and_leave(message: Message) -> None:
            leave()  # the rest costs no more than the sending
            await send(message)

        try:
            await self._app(scope, bounded(receive), send_and_leave)
        finally:
            leave()

    async def _place(self, scope: Scope) -> Callable[[], None]:
        """Of those in which a user's reads are worked on. Other requests may take minutes: they begin at a bounded
        rate, and each has the time that it needs."""
        if scope["path"] in ALWAYS_OPEN:
            return _nothing
        if scope["method"] in SAFE_METHODS:
            return await self._places.take((user(scope), scope["path"] in RESERVED))
        who, now = user(scope), time.monotonic()
        wait = self._changes.wait(who, now)
        self._changes.count(who, now)
        if wait:
            await asyncio.sleep(wait)
        return _nothing

    async def _check(self, scope: Scope) -> None:
        web = self._policy.web()
        if (scope.get("state") or {}).get("reserved") and scope["path"] not in RESERVED:
            detail = "too many connections are being served; those that are left are kept for /metrics and /-/healthy"
            raise HTTPException(503, detail, {"Retry-After": "1", "Connection": "close"})
        self._check_rate(web)
        host = _host(scope)
        if host not in self._hosts and host != _local(scope):
            raise HTTPException(
                421, f"{host} is not a name of this daemon; add it to `hosts` in the configuration if it is"
            )
        if scope["method"] not in SAFE_METHODS:
            _check_origin(scope)
            _check_body(scope)
        length = header(scope["headers"], b"content-length")
        if length and int(length) > MAX_BODY_BYTES:
            raise too_large()
        if scope["path"] not in (*ALWAYS_OPEN, *(() if web.users else PAGE)):
            await self._check_reader(scope, web)

    async def _check_reader(self, scope: Scope, web: Web) -> None:
        if (self._policy.open_reads or web.mutual) and not web.users:
            return
        basic = header(scope["headers"], b"authorization")
        if basic[:6].lower() == "basic " and web.users:
            if await self._passwords.right(web.users, basic[6:], user(scope)):
                return
            failed(self._tokens, user(scope))
        elif authenticate(self._tokens, scope) is not None:
            return
        challenge = 'Basic realm="gpumond", charset="UTF-8"' if web.users else "Bearer"
        raise HTTPException(401, "reading wants authentication here", {"WWW-Authenticate": challenge})

    def _check_rate(self, web: Web) -> None:
        if not web.rate_interval:
            return
        if self._rate_of != (web.rate_interval, web.rate_burst):
            self._rate_of = web.rate_interval, web.rate_burst
            self._rate = TokenBucket(web.rate_burst, web.rate_interval * web.rate_burst)
        now = self._tokens.clock()
        admit(self._rate, "all", now, "too many requests")
        self._rate.count("all", now)

    def _with_headers(self, send: Send) -> Send:
        ours = {**HEADERS, "content-security-policy": STRICT_POLICY}
        configured = {name.lower(): value for name, value in self._policy.web().headers}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [(name, value) for name, value in message.get("headers", ())]
                named = {name.decode("latin-1").lower() for name, _ in given}
                given = [(name, value) for name, value in given if name.decode("latin-1").lower() not in configured]
                added = configured | {name: value for name, value in ours.items() if name not in {*named, *configured}}
                given += [(name.encode(), value.encode()) for name, value in added.items()]
                message = {**message, "headers": given}
            await send(message)

        return send_with_headers


REASONS = {
    400: "host",
    401: "credentials",
    403: "origin",
    413: "oversize",
    415: "media_type",
    421: "host",
    429: "rate",
    503: "busy",
}


def _nothing() -> None:
    pass


def _host(scope: Mapping[str, Any]) -> str:
    """Of the Host header, without port. Never of the target or the URL that a framework makes of both."""
    hosts = [value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == b"host"]
    match = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if match is None:
        raise HTTPException(400, "expected one Host header with a name or an address", {"Connection": "close"})
    return _normal(match[1].strip("[]"))


def _local(scope: Mapping[str, Any]) -> str | None:
    """The address that the connection came to: a browser that names it was not led here by a name."""
    server = scope.get("server")
    return _normal(str(server[0]).partition("%")[0]) if server and server[1] is not None else None


def _normal(host: str) -> str:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)


def _check_origin(scope: Mapping[str, Any]) -> None:
    origins = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
    own = f"{scope['scheme']}://{header(scope['headers'], b'host').strip().lower()}"
    if origins not in ([], [own]):
        raise HTTPException(403, "a page of another origin may change nothing here")


def _check_body(scope: Mapping[str, Any]) -> None:
    """A form or plain text is what a browser sends without asking; JSON it does not."""
    has_body = header(scope["headers"], b"content-length") not in ("", "0") or any(
        name == b"transfer-encoding" for name, _ in scope["headers"]
    )
    stated = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    media_type, _, parameters = (stated or [""])[0].lower().partition(";")
    charset = CHARSET.search(parameters)
    if (has_body or stated) and (len(stated) != 1 or media_type.strip() != "application/json"):
        raise HTTPException(415, "expected one Content-Type header: application/json")
    if charset and charset[1] not in ("utf-8", "us-ascii"):
        raise HTTPException(415, f"expected JSON in UTF-8, not in {charset[1]}")
