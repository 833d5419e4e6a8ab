"""GET / and /docs: the page and the API reference, served from this directory without external resources."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from gpumond.api.docs_page import reference
from gpumond.api.page.bundle import bundle
from gpumond.engine.events import Kind
from gpumond.model.engines import NOT_READ
from gpumond.model.frame import SHARES
from gpumond.model.snapshot import MISSED_LIMIT
from gpumond.model.verdicts import SHAPES
from gpumond.protocol.text import accepts
from gpumond.rules.built_in import BUILT_IN

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


IMMUTABLE = "max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class File:
    """``compressed``: the body with gzip. ``cache``: its Cache-Control."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str
    cache: str


def file(body: bytes, media_type: str, cache: str = "no-cache") -> File:
    return File(body, gzip.compress(body, mtime=0), f"{media_type}; charset=utf-8", _tag(body), cache)


def _tag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


MARKS: dict[Kind, str] = {
    "flush": "▼",
    "oom": "✕",
    "xid": "✕",
    "alert-fired": "▲",
    "alert-resolved": "△",
    "verdict-began": "◆",
    "verdict-ended": "◇",
    "agent-connected": "●",
    "agent-gone": "○",
    "process-ended": "○",
    "device-lost": "○",
    "device-back": "●",
}
"""Signs of events on the time axis of a chart."""


def words() -> str:
    """Return the daemon's vocabulary as a JavaScript module."""
    known: dict[str, object] = {
        "SHARES": list(SHARES),
        "OF_PROCESSES": [share for share in SHARES if share != "unclaimed"],
        "ORDINARY": sorted(SHAPES),
        "MISSED_LIMIT": MISSED_LIMIT,
        "NOT_READ": NOT_READ,
        "MARKS": MARKS,
        "RUNBOOKS": [rule.name for rule in BUILT_IN],
    }
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in known.items())


DIRECTORY = Path(__file__).parent
MODULES = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.js"))} | {"words": words()}
"""Texts of the modules by name."""


def page_files() -> dict[str, File]:
    """Return the files of the page by path. The document names script and style, whose names contain their hash."""
    found = {}
    page = (DIRECTORY / "index.html").read_text()
    for name, text, media_type in (
        ("page.js", bundle(MODULES, "page"), "text/javascript"),
        ("page.css", (DIRECTORY / "page.css").read_text(), "text/css"),
    ):
        stem, suffix = name.split(".")
        hashed = f"{stem}-{_tag(text.encode())}.{suffix}"
        found[f"/{hashed}"] = file(text.encode(), media_type, IMMUTABLE)
        page = page.replace(f'"{name}"', f'"{hashed}"')
    return {"/": file(page.encode(), "text/html"), **found}


PAGE = page_files()
"""They contain no data, and require no authentication, so that users can sign in."""

FILES = PAGE | {"/docs.css": file((DIRECTORY / "docs.css").read_bytes(), "text/css")}

IfNoneMatch = Annotated[str | None, Header()]


async def page(request: Request, if_none_match: IfNoneMatch = None) -> Response:
    return _answer(request, FILES[request.scope["route"].path], if_none_match)


for path in FILES:
    router.add_api_route(path, page)


@router.get("/docs")
async def docs(request: Request, if_none_match: IfNoneMatch = None) -> Response:
    state = request.app.state
    if not hasattr(state, "reference"):  # the routes do not change while the daemon runs
        state.reference = file(reference(request.app.openapi()).encode(), "text/html")
    return _answer(request, state.reference, if_none_match)


def _answer(request: Request, file: File, if_none_match: str | None) -> Response:
    compressed = accepts(request.headers.get("accept-encoding", ""), "gzip")
    etag = f'"{file.etag}-gzip"' if compressed else f'"{file.etag}"'
    headers = HEADERS | {"Cache-Control": file.cache, "ETag": etag}
    if if_none_match == etag:
        return Response(status_code=304, headers=headers)
    if compressed:
        return Response(file.compressed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
