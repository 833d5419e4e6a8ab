"""Endpoints for monitoring and operation: metrics, probes, the reload, and the release of the driver."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from gpumond.config.models import EncodableModel
from gpumond.core import DaemonControl
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.exposition import ALL_GROUPS, Group
from gpumond.serve import responses
from gpumond.serve.authorization import require_admin
from gpumond.serve.responses import problem
from gpumond.serve.routes import BODY_TYPE_KEY, bearer, core_of, json_response, problem_responses

router = APIRouter(tags=["operation"])


@router.get("/metrics", response_class=PlainTextResponse, summary="Metrics in Prometheus text format or OpenMetrics")
async def metrics(
    request: Request,
    compat: Compat | None = None,
    collect: Annotated[list[Group] | None, Query(alias="collect[]")] = None,
) -> Response:
    """`compat=dcgm`: device metrics with the latest dcgm-exporter's names, labels and units. `collect[]=device`: only
    device metrics; repeat it for `owner`, `process` and `daemon`.
    """
    accept, accept_encoding = (request.headers.get(name, "") for name in ("accept", "accept-encoding"))
    groups = frozenset(collect or ALL_GROUPS)
    return await responses.metrics(core_of(request), accept, accept_encoding, compat, groups)


@router.get("/healthz", response_class=PlainTextResponse, include_in_schema=False)
@router.get("/-/healthy", response_class=PlainTextResponse, summary="Liveness of the daemon; independent of the GPUs")
async def healthy() -> Response:
    return responses.healthy()


@router.get("/readyz", response_class=PlainTextResponse, include_in_schema=False)
@router.get(
    "/-/ready",
    response_class=PlainTextResponse,
    responses=problem_responses(503),
    summary="Readiness: devices can be read",
)
async def ready(request: Request) -> Response:
    return responses.ready(core_of(request).frame)


@router.post(
    "/-/reload",
    response_class=PlainTextResponse,
    responses=problem_responses(401, 403, 422),
    dependencies=[Depends(bearer)],
    summary="Reload the configuration",
)
async def reload(request: Request, by: str = Depends(require_admin)) -> Response:
    """422: the configuration is invalid (see `detail`); the previous one stays in effect."""
    return PlainTextResponse(await core_of(request).get(DaemonControl).reload(by) + "\n")


class ReleaseBody(EncodableModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"for_seconds": 120}]})

    for_seconds: float = Field(gt=0, le=86400)


class ReleaseAnswer(BaseModel):
    """Time until which gpumond is detached from the driver."""

    released_until: float = Field(examples=[1_790_000_120.0])


@router.post(
    "/api/v1/release",
    summary="Detach from the driver temporarily",
    dependencies=[Depends(bearer)],
    responses={
        200: {
            BODY_TYPE_KEY: ReleaseAnswer,
            "content": {"application/json": {"example": {"released_until": 1_790_000_120.0}}},
        },
        **problem_responses(401, 403, 422, 503, 504, 507),
    },
    response_model=None,
)
async def release(request: Request, body: ReleaseBody, requested_by: str = Depends(require_admin)) -> Response:
    """Responds when the daemon has detached. The daemon reattaches automatically.

    504: a driver call doesn't return, so the driver is still open.
    """
    until, detached = await core_of(request).get(DaemonControl).detach(body.for_seconds, requested_by)
    if not detached:
        return problem(504, "a driver call doesn't return, so the driver process still has the driver open")
    return json_response(ReleaseAnswer, ReleaseAnswer(released_until=until))
