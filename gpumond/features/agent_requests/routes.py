"""Requests to one program other than a flush: limit, snapshot, and what its memory contains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ConfigDict, Field

from gpumond.config.models import EncodableModel
from gpumond.diagnosis.advice import advice_texts, context_of
from gpumond.facts.frame import Frame, find_device_uuid_in_frame
from gpumond.facts.messages import AgentResponse, RequestKind
from gpumond.facts.program import AllocationSite, AppliedLimit, Dump, LiveClasses
from gpumond.serve import examples
from gpumond.serve.authentication import Caller
from gpumond.serve.authorization import require_owner_or_admin
from gpumond.serve.responses import problem
from gpumond.serve.routes import Router, bearer, core_of, json_response, problem_responses

router = Router("agents")

Pid = Annotated[int, Path(gt=0)]
SnapshotId = Annotated[int, Path(gt=0, lt=2**31)]
MAX_RECORD_SECONDS = 600.0


class LimitBody(EncodableModel):
    """Limit of a program.

    ``limit_bytes``: null removes the limit. ``device``: an index, a UUID or a prefix of one, or a PCI address; null for
    all devices that the program uses.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"limit_bytes": 20 * examples.GIB}]}
    )

    limit_bytes: int | None = Field(gt=0, lt=2**63)
    device: str | None = Field(default=None, min_length=1, max_length=128)


class RecordingBody(EncodableModel):
    """``record_seconds``: record the stacks of allocations for this time first; null for no recording."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"record_seconds": 60.0}]})

    record_seconds: float | None = Field(default=None, ge=1, le=MAX_RECORD_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What a program's live memory consists of.

    ``sites``, ``unrecorded_bytes`` (live bytes that were allocated before), ``snapshot`` and ``folded`` (stacks for
    flame graphs) are results of a recording. ``advice``: changes that apply. ``kv_cache_bytes``: the part of the other
    leaf tensors that a configured serving engine reports as its KV cache; null if none does. A class that is null is
    unknown; ``reason`` shows why. ``paused_seconds``: the longest time for which the reading has paused the program.
    ``age_seconds``: age of the classes, which are read at most once a second.
    """

    classes: tuple[LiveClasses, ...] = ()
    sites: tuple[AllocationSite, ...] = ()
    unrecorded_bytes: int = 0
    kv_cache_bytes: int | None = None
    advice: tuple[str, ...] = ()
    snapshot: Dump | None = None
    folded: Dump | None = None
    reason: str = ""
    paused_seconds: float = 0.0
    age_seconds: float = 0.0


WHY_EXAMPLE = Why(
    classes=(examples.LIVE_CLASSES,),
    sites=(examples.SITE,),
    unrecorded_bytes=examples.GIB,
    advice=("use a smaller batch",),
    paused_seconds=0.105,
    snapshot=examples.DUMP,
    folded=replace(
        examples.DUMP, path="/home/research/.local/state/gpumond/snapshots/train-4242-1790000060.folded", id=2
    ),
)

PROBLEMS = (404, 409, 422, 503, 504, 507)


@router.change(
    "POST /agents/{pid}/limit",
    "Set a limit in a program that allows it",
    list[AppliedLimit],
    [examples.APPLIED_LIMIT],
    PROBLEMS,
)
async def limit(
    request: Request, pid: Pid, body: LimitBody, caller: Caller = Depends(require_owner_or_admin)
) -> Response:
    """Sets a limit. Above it, the program's allocators first flush, then fail, as on a smaller device.

    404: no agent has this pid, it's another user's program, or no device has this name. 409: the program doesn't allow
    or support a limit; see `detail`. 504: the program didn't respond.
    """
    device = None if body.device is None else find_device_uuid_in_frame(body.device, core_of(request).frame)
    answer = await _ask(request, pid, "limit", caller, body.limit_bytes, device)
    if isinstance(answer, Response):
        return answer
    return json_response(list[AppliedLimit], list(answer.limits))


@router.change(
    "POST /agents/{pid}/snapshot", "Make a program write its framework's memory snapshot", Dump, examples.DUMP, PROBLEMS
)
async def snapshot(
    request: Request, pid: Pid, body: RecordingBody | None = None, caller: Caller = Depends(require_owner_or_admin)
) -> Response:
    """Writes the snapshot to a file of at most 256 MiB that the program's user owns, and returns its `path`. `GET
    /api/v1/agents/PID/snapshots/ID` returns the file.

    404: no agent has this pid, or it's another user's program. 409: no snapshot is available; see `detail`. 504: the
    program didn't respond.
    """
    answer = await _ask(request, pid, "snapshot", caller, record_seconds=_seconds(body))
    if isinstance(answer, Response):
        return answer
    return json_response(Dump, answer.dump)


@router.change("POST /agents/{pid}/why", "What a program's live memory consists of", Why, WHY_EXAMPLE, PROBLEMS)
async def why(
    request: Request, pid: Pid, body: RecordingBody | None = None, caller: Caller = Depends(require_owner_or_admin)
) -> Response:
    """Returns live bytes by class: parameters, gradients, optimizer state, buffers, other tensors and activations. The
    program may pause for up to a quarter of a second.

    With `record_seconds`, the allocator records its history for this time. The response then contains the sites that
    allocated most, and the program writes a snapshot and the folded stacks to files.

    404: no agent has this pid, or it's another user's program. 409: refused; see `detail`. 504: the program didn't
    respond.
    """
    answer = await _ask(request, pid, "classes", caller, record_seconds=_seconds(body))
    if isinstance(answer, Response):
        return answer
    result = Why(
        classes=answer.classes,
        sites=answer.sites,
        unrecorded_bytes=answer.unrecorded_bytes,
        kv_cache_bytes=_kv_cache_bytes(core_of(request).frame, pid, answer.classes),
        advice=_advice(core_of(request).frame, pid, answer.classes),
        snapshot=answer.dump,
        folded=answer.folded,
        reason=answer.reason if answer.classes else "",
        paused_seconds=answer.paused_seconds,
        age_seconds=answer.age_seconds,
    )
    return json_response(Why, result)


@router.get(
    "/agents/{pid}/snapshots/{snapshot_id}",
    summary="A snapshot file that a program wrote",
    dependencies=[Depends(bearer)],
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "description": "The bytes of the file",
        },
        **problem_responses(401, 403, *PROBLEMS),
    },
)
async def snapshot_file(
    request: Request, pid: Pid, snapshot_id: SnapshotId, caller: Caller = Depends(require_owner_or_admin)
) -> Response:
    """Streams the file with this `id`. The program keeps four files.

    404: no agent has this pid, or it's another user's program. 409: the file doesn't exist; see `detail`. 504: the
    program didn't respond.
    """
    download = await core_of(request).program_requests.open_snapshot(pid, snapshot_id, caller.name, caller.uid)
    if download is None:
        return problem(504, f"pid {pid} didn't respond in time, or disconnected")
    if isinstance(download, AgentResponse):
        return problem(409, download.reason or "the program didn't carry out the request")
    headers = {
        "Content-Length": str(download.size_bytes),
        "Content-Disposition": f'attachment; filename="gpumond-{pid}-{snapshot_id}"',
        "Cache-Control": "no-store",
    }
    return StreamingResponse(download.parts, media_type="application/octet-stream", headers=headers)


def _seconds(body: RecordingBody | None) -> float | None:
    return None if body is None else body.record_seconds


def _kv_cache_bytes(frame: Frame | None, pid: int, classes: tuple[LiveClasses, ...]) -> int | None:
    """Return the KV cache of an engine whose only process this is, if it may be part of the only pool."""
    for engine in frame.snapshot.engines if frame else ():
        kv_cache_bytes = engine.kv_cache_bytes
        if [each.pid for each in engine.processes] == [pid] and kv_cache_bytes is not None and len(classes) == 1:
            tensors = classes[0].tensors_bytes
            return kv_cache_bytes if tensors is not None and kv_cache_bytes <= tensors else None
    return None


def _advice(frame: Frame | None, pid: int, classes: tuple[LiveClasses, ...]) -> tuple[str, ...]:
    """Return the advice for a program on the devices of its classes."""
    report = None if frame is None else next((each for each in frame.snapshot.reports if each.pid == pid), None)
    if frame is None or report is None:
        return ()
    unique_texts: dict[str, None] = {}
    for uuid in dict.fromkeys(each.device_uuid for each in classes):
        has_retried = any(pool.retries or pool.ooms for pool in report.pools if pool.device_uuid == uuid)
        case = replace(context_of(report, uuid, frame.snapshot, has_retried), classes=classes)
        unique_texts.update(dict.fromkeys(advice_texts(case)))
    return tuple(unique_texts)


async def _ask(
    request: Request,
    pid: int,
    kind: RequestKind,
    caller: Caller,
    limit_bytes: int | None = None,
    device: str | None = None,
    record_seconds: float | None = None,
) -> AgentResponse | Response:
    """Return the program's answer, or a problem document."""
    answer = await core_of(request).program_requests.ask(
        pid, kind, limit_bytes, device, caller.name, caller.uid, record_seconds
    )
    if answer is None:
        return problem(504, f"pid {pid} didn't respond in time, or disconnected; the outcome is unknown")
    if kind == "limit":
        succeeded = any(each.applied for each in answer.limits)
    elif kind == "classes":
        succeeded = bool(answer.classes or answer.sites)
    else:
        succeeded = answer.dump is not None and answer.dump.path is not None
    return answer if succeeded else problem(409, answer.reason or "the program didn't carry out the request")
