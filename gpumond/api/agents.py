"""POST /api/v1/agents/PID/limit and /snapshot: an administrator's requests to a program other than a flush."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, TypeAdapter

from gpumond.api import examples
from gpumond.api.auth import bearer, require_token
from gpumond.api.problems import problem
from gpumond.api.view import view_of
from gpumond.model.device_names import device_named
from gpumond.model.program import AppliedLimit, Dump
from gpumond.protocol.messages import AgentResponse, Asked
from gpumond.protocol.text import Encodable

router = APIRouter(tags=["agents"])
LIMITS: TypeAdapter[list[AppliedLimit]] = TypeAdapter(list[AppliedLimit])
DUMP: TypeAdapter[Dump] = TypeAdapter(Dump)

Pid = Annotated[int, Path(gt=0)]


class LimitBody(Encodable):
    """Soft quota of a program.

    ``limit_bytes``: null removes the limit. ``device``: an index, a UUID or a prefix of one, or a PCI address; null for
    all devices that the program uses.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"limit_bytes": 20 * examples.GIB}]}
    )

    limit_bytes: int | None = Field(gt=0, lt=2**63)
    device: str | None = Field(default=None, min_length=1, max_length=128)


PROBLEMS = (401, 403, 404, 409, 422, 503, 504, 507)


@router.post(
    "/agents/{pid}/limit",
    summary="Set a soft quota in a program that allows it",
    dependencies=[Depends(bearer)],
    **examples.described(list[AppliedLimit], [examples.APPLIED_LIMIT], *PROBLEMS),
)
async def limit(request: Request, pid: Pid, body: LimitBody, requested_by: str = Depends(require_token)) -> Response:
    """Sets a limit above which the program's allocators flush and then fail, as on a smaller device.

    The limit frees no memory by itself. The request is recorded in the audit log.

    404: no agent has this pid, or no device has this name. 409: the program does not allow or support a limit; see
    `detail`. 504: the program did not answer.
    """
    device = None if body.device is None else device_named(body.device, view_of(request).frame)
    answer = await _ask(request, pid, "limit", requested_by, body.limit_bytes, device)
    if isinstance(answer, Response):
        return answer
    return Response(LIMITS.dump_json(list(answer.limits)), media_type="application/json")


@router.post(
    "/agents/{pid}/snapshot",
    summary="Make a program write its framework's memory snapshot",
    dependencies=[Depends(bearer)],
    **examples.described(Dump, examples.DUMP, *PROBLEMS),
)
async def snapshot(request: Request, pid: Pid, requested_by: str = Depends(require_token)) -> Response:
    """Writes the snapshot to a file of at most 256 MiB that the program's user owns, and returns its `path`.

    gpumond does not read the file.

    404: no agent has this pid. 409: no snapshot is available; see `detail`. 504: the program did not answer.
    """
    answer = await _ask(request, pid, "snapshot", requested_by)
    if isinstance(answer, Response):
        return answer
    return Response(DUMP.dump_json(answer.dump), media_type="application/json")  # type: ignore[arg-type]


async def _ask(
    request: Request,
    pid: int,
    kind: Asked,
    requested_by: str,
    limit_bytes: int | None = None,
    device: str | None = None,
) -> AgentResponse | Response:
    """Return the program's answer, or a problem document."""
    answer = await view_of(request).ask(pid, kind, limit_bytes, device, requested_by)
    if answer is None:
        return problem(504, f"pid {pid} did not answer in time, or disconnected; the outcome is unknown")
    if kind == "limit":
        succeeded = any(one.applied for one in answer.limits)
    else:
        succeeded = answer.dump is not None and answer.dump.path is not None
    return answer if succeeded else problem(409, answer.reason or "the program did nothing")
