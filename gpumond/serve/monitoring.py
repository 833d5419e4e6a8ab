"""Metrics and probes: answers that need no web framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from urllib.parse import parse_qsl

from starlette.types import Scope, Send

from gpumond.facts.frame import Frame
from gpumond.facts.text import accepts
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Group
from gpumond.serve.auth import header

if TYPE_CHECKING:
    from gpumond.kernel import Kernel

LIVENESS = ("/-/healthy", "/healthz")
READINESS = ("/-/ready", "/readyz")
INTERNAL_ERROR = "internal error of gpumond; see its log for details"
TEXT = {"Content-Type": "text/plain; charset=utf-8"}
COMPAT: Mapping[str, Compat] = {name: name for name in get_args(Compat)}
GROUPS: Mapping[str, Group] = {name: name for name in get_args(Group)}
COLLECT = "collect[]"
"""The parameter with a group of families, as node_exporter names it."""


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = TEXT

    async def send(self, send: Send) -> None:
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


async def monitored(kernel: Kernel, scope: Scope) -> Answer | None:
    """Answer a GET of metrics or of a probe. Returns None for any other request."""
    path = scope["path"]
    if scope["method"] != "GET":
        return None
    if path in LIVENESS:
        return healthy()
    if path in READINESS:
        return ready(kernel.frame)
    asked = _asked(scope["query_string"]) if path == "/metrics" else None
    if asked is None:
        return None
    accept, encoding = (header(scope["headers"], name) for name in (b"accept", b"accept-encoding"))
    return await metrics(kernel, accept, encoding, *asked)


def _asked(query: bytes) -> tuple[Compat | None, frozenset[Group]] | None:
    """Return the values of ``compat`` and ``collect[]``; None for other parameters and values."""
    if not query:
        return None, ALL_GROUPS
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        versions = [COMPAT[text] for name, text in pairs if name == "compat"]
        groups = frozenset(GROUPS[text] for name, text in pairs if name == COLLECT)
    except (KeyError, ValueError):
        return None
    if len(versions) > 1 or not {name for name, _ in pairs} <= {"compat", COLLECT}:
        return None
    return versions[0] if versions else None, groups or ALL_GROUPS


def healthy() -> Answer:
    return Answer(b"gpumond is healthy\n")


def ready(frame: Frame | None) -> Answer:
    if frame is None:
        return refusal(503, "the first reading is in progress")
    source = frame.snapshot.source
    if not source.up:
        return refusal(503, f"cannot read devices: {source.reason}: {source.detail}")
    return Answer(b"gpumond is ready\n")


async def metrics(
    kernel: Kernel, accept: str, accept_encoding: str, compat: Compat | None, groups: frozenset[Group]
) -> Answer:
    page = await kernel.metrics(accept, compat, groups)
    headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding"}
    if accepts(accept_encoding, "gzip"):
        return Answer(page.compressed, headers=headers | {"Content-Encoding": "gzip"})
    return Answer(page.plain, headers=headers)


def refusal(status: int, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> Answer:
    """Return an RFC 9457 problem document."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **members}
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Answer(text.encode(), status, {**(headers or {}), "Content-Type": "application/problem+json"})
