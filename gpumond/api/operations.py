"""`/metrics`, `/-/healthy`, `/-/ready`, `/-/reload`: for Prometheus and whoever keeps the daemon running."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response

from gpumond.api.auth import bearer, require_token
from gpumond.api.problems import problem, responses

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=PlainTextResponse, summary="Prometheus text or OpenMetrics")
async def metrics(request: Request, compat: Literal["dcgm"] | None = None) -> Response:
    """``compat=dcgm``: the devices under dcgm-exporter's names, labels and units."""
    page = await request.app.state.view.metrics(request.headers.get("accept", ""), compat)
    headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(page.compressed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(page.plain, headers=headers)


@router.get("/-/healthy", response_class=PlainTextResponse, summary="The daemon's loop turns; says nothing of the GPUs")
async def healthy() -> str:
    return "gpumond is healthy\n"


@router.get(
    "/-/ready", response_class=PlainTextResponse, responses=responses(503), summary="Devices are read and fresh"
)
async def ready(request: Request) -> Response:
    frame = request.app.state.view.frame
    if frame is None:
        return problem(503, "the first reading is under way")
    source = frame.snapshot.source
    if not source.up:
        return problem(503, f"no device can be read: {source.reason}: {source.detail}")
    return PlainTextResponse("gpumond is ready\n")


@router.post(
    "/-/reload",
    response_class=PlainTextResponse,
    responses=responses(401, 403, 422),
    dependencies=[Depends(bearer)],
    summary="Read the configuration again",
)
async def reload(request: Request, by: str = Depends(require_token)) -> Response:
    """As SIGHUP does. 422: it is wrong, and the one that held still holds; `detail` says where."""
    return PlainTextResponse(await request.app.state.view.reload(by) + "\n")
