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
from gpumond.model.engines import NOT_READ
from gpumond.model.frame import SHARES
from gpumond.model.snapshot import MISSED_LIMIT
from gpumond.model.verdicts import SHAPES
from gpumond.protocol.text import accepts

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class File:
    """``compressed``: the body with gzip."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str


def read(name: str, media_type: str) -> File:
    return file(Path(__file__).with_name(name).read_bytes(), media_type)


def file(body: bytes, media_type: str) -> File:
    tag = hashlib.sha256(body).hexdigest()[:16]
    return File(body, gzip.compress(body, mtime=0), f"{media_type}; charset=utf-8", tag)


def words() -> str:
    """Return the daemon's vocabulary as a JavaScript module."""
    known = {
        "SHARES": list(SHARES),
        "OF_PROCESSES": [share for share in SHARES if share != "unclaimed"],
        "ORDINARY": sorted(SHAPES),
        "MISSED_LIMIT": MISSED_LIMIT,
        "NOT_READ": NOT_READ,
    }
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in known.items())


MODULES = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.js")))

PAGE = {
    "/": read("index.html", "text/html"),
    "/page.css": read("page.css", "text/css"),
    "/words.js": file(words().encode(), "text/javascript"),
    **{f"/{name}": read(name, "text/javascript") for name in MODULES},
}
"""Files of the page by path. They contain no data, and require no authentication, so that users can sign in."""

FILES = PAGE | {"/docs.css": read("docs.css", "text/css")}

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
    headers = HEADERS | {"ETag": etag}
    if if_none_match == etag:
        return Response(status_code=304, headers=headers)
    if compressed:
        return Response(file.compressed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
