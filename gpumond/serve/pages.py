"""The files of the web UI and the API reference, and its stream of frames."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from gpumond.facts.frame import Frame
from gpumond.facts.text import accepts
from gpumond.page.files import FILES, HEADERS, File, file
from gpumond.serve.auth import header
from gpumond.serve.docs import reference
from gpumond.serve.streams import EventStream


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


router = APIRouter(include_in_schema=False)


async def page(request: Request) -> Response:
    return file_response(request.scope, FILES[request.scope["route"].path])


for path in FILES:
    router.add_api_route(path, page)


@router.get("/docs")
async def docs(request: Request) -> Response:
    state = request.app.state
    if not hasattr(state, "reference"):  # the routes do not change while the daemon runs
        state.reference = file(reference(request.app.openapi()).encode(), "text/html")
    return file_response(request.scope, state.reference)
