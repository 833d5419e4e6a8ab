"""Answers of a few lines, and refusals as RFC 9457 problem documents: they need no web framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.types import Send

INTERNAL_ERROR = "internal error of gpumond; see its log for details"
TEXT = {"Content-Type": "text/plain; charset=utf-8"}


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = TEXT

    async def send(self, send: Send) -> None:
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def refusal(status: int, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> Answer:
    """Return an RFC 9457 problem document."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **members}
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Answer(text.encode(), status, {**(headers or {}), "Content-Type": "application/problem+json"})
