"""GET /: the page, three plain files. Nothing on it comes from elsewhere, so that it works without a network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header
from fastapi.responses import Response

router = APIRouter(include_in_schema=False)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class File:
    body: bytes
    media_type: str
    etag: str


def read(name: str, media_type: str) -> File:
    body = Path(__file__).with_name(name).read_bytes()
    return File(body, f"{media_type}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:16]}"')


FILES = {
    "/": read("index.html", "text/html"),
    "/page.css": read("page.css", "text/css"),
    "/page.js": read("page.js", "text/javascript"),
}

IfNoneMatch = Annotated[str | None, Header()]


@router.get("/")
async def index(if_none_match: IfNoneMatch = None) -> Response:
    return _answer(FILES["/"], if_none_match)


@router.get("/page.css")
async def style(if_none_match: IfNoneMatch = None) -> Response:
    return _answer(FILES["/page.css"], if_none_match)


@router.get("/page.js")
async def script(if_none_match: IfNoneMatch = None) -> Response:
    return _answer(FILES["/page.js"], if_none_match)


def _answer(file: File, if_none_match: str | None) -> Response:
    headers = HEADERS | {"ETag": file.etag}
    if if_none_match == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
