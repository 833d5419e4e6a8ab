"""`/metrics`, `/-/healthy`, `/-/ready` and `/-/reload`: endpoints for monitoring and operation."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse, Response

from gpumond.api.auth import bearer, require_token
from gpumond.api.problems import problem, responses
from gpumond.api.view import view_of

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus text format or OpenMetrics")
async def metrics(request: Request, compat: Literal["dcgm"] | None = None) -> Response:
    """Returns the metrics. ``compat=dcgm``: devices with dcgm-exporter's names, labels and units."""
    page = await view_of(request).metrics(request.headers.get("accept", ""), compat)
    headers = {"Content-Type": page.content_type, "Vary": "Accept, Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(page.compressed, headers=headers | {"Content-Encoding": "gzip"})
    return Response(page.plain, headers=headers)


@router.get("/-/healthy", response_class=PlainTextResponse, summary="Liveness of the daemon; independent of the GPUs")
async def healthy() -> str:
    return "gpumond is healthy\n"


@router.get(
    "/-/ready", response_class=PlainTextResponse, responses=responses(503), summary="Readiness: devices can be read"
)
async def ready(request: Request) -> Response:
    frame = view_of(request).frame
    if frame is None:
        return problem(503, "the first reading is in progress")
    source = frame.snapshot.source
    if not source.up:
        return problem(503, f"cannot read devices: {source.reason}: {source.detail}")
    return PlainTextResponse("gpumond is ready\n")


@router.post(
    "/-/reload",
    response_class=PlainTextResponse,
    responses=responses(401, 403, 422),
    dependencies=[Depends(bearer)],
    summary="Reload the configuration",
)
async def reload(request: Request, by: str = Depends(require_token)) -> Response:
    """Reloads the configuration, as SIGHUP does. 422: it is invalid and the previous one stays in effect; see
    `detail`."""
    return PlainTextResponse(await view_of(request).reload(by) + "\n")
