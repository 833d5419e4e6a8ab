"""Answers to the first requests of the page: its files, and the stream of frames. They need no FastAPI."""

from __future__ import annotations

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from gpumond.facts.frame import Frame
from gpumond.facts.text import accepts
from gpumond.page.files import FILES, HEADERS, File
from gpumond.serve.auth import header
from gpumond.serve.streams import EventStream

LIVE = "/api/v1/live"


def page_answer(scope: Scope, state: State) -> Response | None:
    """Answer a GET of a file of the page or of the stream. Returns None for any other path."""
    if scope["path"] == LIVE:
        return live_stream(scope, state)
    file = FILES.get(scope["path"])
    return file_response(scope, file) if file else None


def live_stream(scope: Scope, state: State) -> EventStream:
    present(state.kernel.frame)
    compressed = accepts(header(scope["headers"], b"accept-encoding"), "gzip")
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if compressed else {})
    return EventStream(scope, state, state.live.messages(compressed), headers)


def present(frame: Frame | None) -> Frame:
    """Return the frame. Raises 503 before the first one."""
    if frame is None:
        raise HTTPException(503, "the first reading is in progress; retry in a second")
    return frame


def file_response(scope: Scope, file: File) -> Response:
    compressed = accepts(header(scope["headers"], b"accept-encoding"), "gzip")
    etag = f'"{file.etag}-gzip"' if compressed else f'"{file.etag}"'
    headers = HEADERS | {"Cache-Control": file.cache, "ETag": etag}
    if header(scope["headers"], b"if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if compressed:
        return Response(file.compressed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
