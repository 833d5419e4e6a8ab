"""Metrics, probes and problem documents. They need no FastAPI, so a daemon answers before it imports the API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import PlainTextResponse, Response

from gpumond.core import Core
from gpumond.facts.frame import Frame
from gpumond.facts.units import accepts
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Group

LIVENESS_PATHS = ("/-/healthy", "/healthz")
READINESS_PATHS = ("/-/ready", "/readyz")
METRICS_PATH = "/metrics"
INTERNAL_ERROR = "internal error of gpumond; see its log for details"


async def metrics(
    core: Core,
    accept: str,
    accept_encoding: str,
    compat: Compat | None = None,
    groups: frozenset[Group] = ALL_GROUPS,
) -> Response:
    page = await core.metrics(accept, compat, groups)
    headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding"}
    if accepts(accept_encoding, "gzip"):
        return Response(page.gzip_body, headers=headers | {"Content-Encoding": "gzip"})
    return Response(page.body, headers=headers)


def healthy() -> Response:
    return PlainTextResponse("gpumond is healthy\n")


def ready(frame: Frame | None) -> Response:
    if frame is None:
        return problem(503, "the first reading is in progress", {"Retry-After": "1"})
    source = frame.snapshot.source
    if not source.up:
        return problem(503, f"can't read devices: {source.reason}: {source.detail}")
    return PlainTextResponse("gpumond is ready\n")


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    """Return an RFC 9457 problem document."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **members}
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, headers, media_type="application/problem+json")
