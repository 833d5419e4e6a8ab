"""GET / and /docs: the page and the API reference."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gpumond.page.answers import file_response
from gpumond.page.files import FILES, file
from gpumond.serve.docs import reference

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
