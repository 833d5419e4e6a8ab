"""API behind its guard, and the tokens and requests of its tests."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import bcrypt
import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from gpumond.config.tokens import Token, token_digest
from gpumond.serve.app import app_state
from gpumond.serve.authentication import Tokens
from gpumond.serve.guard import Guard, Policy
from tests.serve.application import View, application

ADMIN = {"Authorization": "Bearer gpm_own"}
FLUSH = {"target": {"all": True}}
RULE = {"name": "hog", "scope": "process", "value": "used_bytes", "above": "40GiB"}
READERS = {"prometheus": bcrypt.hashpw(b"wonder", bcrypt.gensalt(4))}
OTHERS = [
    Token("reader", frozenset({"read"}), token_digest("gpm_reader")),
    Token("ruler", frozenset({"rules"}), token_digest("gpm_ruler")),
    Token("flusher", frozenset({"flush"}), token_digest("gpm_flusher")),
]


class PeerMiddleware:
    """Middleware that sets the peer's address and, for a Unix socket, its uid, as a server does."""

    def __init__(self, app: ASGIApp, uid: int | None, client: str) -> None:
        self.app, self.uid, self.client = app, uid, client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"uid": self.uid}
        scope["server"], scope["client"] = ("10.0.0.7", 9917), (self.client, 50000)
        await self.app(scope, receive, send)


class GuardedApi:
    """API behind its guard, with a view of fixed values."""

    def __init__(
        self, policy: Policy = Policy(), file_tokens: Sequence[Token] = OTHERS, view: View | None = None
    ) -> None:
        self.view: Any = view or View()
        self.tokens = Tokens("gpm_own", file_tokens=lambda: file_tokens, clock=lambda: 0.0)
        self.state = app_state(self.view, self.tokens)
        application().state = self.state
        self.app = Guard(application(), self.tokens, policy)

    def ask(
        self, method: str, path: str, uid: int | None = None, client: str = "127.0.0.1", **options: Any
    ) -> httpx.Response:
        application().state = self.state

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=PeerMiddleware(self.app, uid, client), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9917") as http:
                return await http.request(method, path, **options)

        return asyncio.run(run())

    def flush(self, headers: Mapping[str, str] = ADMIN, uid: int | None = None, **options: Any) -> httpx.Response:
        return self.ask("POST", "/api/v1/flushes", uid, headers=headers, json=FLUSH, **options)

    def unchanged(self) -> bool:
        return not self.view.flush_requests and not self.view.agent_requests and not self.view.store.names("rules")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
