"""GET / and /docs: the page and the API reference."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from gpumond.api.docs_page import reference
from gpumond.api.page import FILES, HEADERS, File, file
from gpumond.protocol.text import accepts

router = APIRouter(include_in_schema=False)

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
