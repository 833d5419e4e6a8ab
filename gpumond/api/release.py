"""POST /api/v1/release: release the driver temporarily, for an upgrade, a reset or a change of MIG mode."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gpumond.api.auth import bearer, require_token
from gpumond.api.problems import problem, responses
from gpumond.api.view import view_of
from gpumond.protocol.text import Encodable

router = APIRouter(tags=["operation"])


class ReleaseBody(Encodable):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"for_seconds": 120}]})

    for_seconds: float = Field(gt=0, le=86400)


class ReleaseAnswer(BaseModel):
    """Time until which the driver is released."""

    released_until: float = Field(examples=[1_790_000_120.0])


@router.post(
    "/release",
    summary="Release the driver temporarily",
    dependencies=[Depends(bearer)],
    responses={
        200: {
            "model": ReleaseAnswer,
            "content": {"application/json": {"example": {"released_until": 1_790_000_120.0}}},
        },
        **responses(401, 403, 422, 503, 504, 507),
    },
    response_model=None,
)
async def release(request: Request, body: ReleaseBody, requested_by: str = Depends(require_token)) -> Response:
    """Responds when the daemon holds no driver descriptor; it reattaches automatically.

    504: a driver call does not return, so that a process of the daemon still holds the driver.
    """
    until, released = await view_of(request).release(body.for_seconds, requested_by)
    if not released:
        return problem(504, "a driver call does not return, and its process still holds the driver")
    return Response(
        TypeAdapter(ReleaseAnswer).dump_json(ReleaseAnswer(released_until=until)), media_type="application/json"
    )
