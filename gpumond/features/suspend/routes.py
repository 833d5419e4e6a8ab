"""HTTP API of suspensions: suspend programs and resume them, with receipts, and those that are suspended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, model_validator

from gpumond.config.models import EncodableModel
from gpumond.facts.errors import LIST_PROGRAMS_HINT, NoSuchTarget, did_you_mean
from gpumond.facts.flush import Target, no_agent_error
from gpumond.facts.messages import MAX_WORKLOAD_LENGTH
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, Snapshot
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram, SuspensionReceipt
from gpumond.features.suspend.decision import SuspendRequest as SuspendRequest, is_idle
from gpumond.features.suspend.suspender import Suspender
from gpumond.serve import examples
from gpumond.serve.authentication import Caller
from gpumond.serve.authorization import require_flush
from gpumond.serve.resources import streamed_json
from gpumond.serve.routes import Router, core_of, json_response

router = Router("suspend")


@dataclass(frozen=True, slots=True)
class Receipts:
    receipts: tuple[SuspensionReceipt, ...]


EXAMPLE_RECEIPT = SuspensionReceipt(
    action="suspend",
    pid=4242,
    start_ticks=examples.START_TICKS,
    workload="notebook",
    outcome="suspended",
    requested_by="uid:1000",
    started_at=examples.TAKEN_AT,
    state="suspended",
    expected_bytes=61 * examples.GIB,
    released_bytes=61 * examples.GIB,
    host_bytes=60 * examples.GIB,
    steps=(("lock", 0.01), ("checkpoint", 38.2)),
    duration_seconds=39.0,
    device_uuids=(examples.UUID,),
)
EXAMPLE_RESUMPTION = replace(
    EXAMPLE_RECEIPT,
    action="resume",
    outcome="resumed",
    state="",
    released_bytes=None,
    host_bytes=None,
    steps=(("restore", 11.2), ("unlock", 0.01)),
    duration_seconds=11.4,
    returned_bytes=61 * examples.GIB,
)
EXAMPLE_PROGRAM = SuspendedProgram(
    id=f"4242-{examples.START_TICKS}",
    pid=4242,
    start_ticks=examples.START_TICKS,
    uid=1000,
    workload="notebook",
    state="suspended",
    since=examples.TAKEN_AT,
    memory=(SuspendedMemory(examples.UUID, 0, 61 * examples.GIB),),
    host_bytes=60 * examples.GIB,
    requested_by="uid:1000",
)


class ProgramTarget(EncodableModel):
    """Exactly one of pid, workload and all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pid: int | None = Field(default=None, gt=0)
    workload: str | None = Field(default=None, min_length=1, max_length=MAX_WORKLOAD_LENGTH)
    all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> ProgramTarget:
        if sum((self.pid is not None, self.workload is not None, self.all)) != 1:
            raise ValueError('pass exactly one of {"pid": N}, {"workload": NAME}, {"all": true}')
        return self

    def matches(self, pid: int, workload: str) -> bool:
        return self.all or pid == self.pid or (self.workload is not None and workload == self.workload)


class SuspendBody(EncodableModel):
    """`idle_for_seconds`: only programs that have done no work on their devices for this long."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"target": {"workload": "notebook"}}]})

    target: ProgramTarget
    idle_for_seconds: float = Field(default=0.0, ge=0, le=10 * 365 * 86400.0)
    dry_run: bool = Field(default=False, strict=True)


class ResumeBody(EncodableModel):
    """`wait_seconds`: the longest wait for the program's memory."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"target": {"pid": 4242}}]})

    target: ProgramTarget
    wait_seconds: float = Field(default=0.0, ge=0, le=3600)


@router.change(
    "POST /suspensions", "Suspend programs and return receipts", Receipts, Receipts((EXAMPLE_RECEIPT,)), (404, 422, 503)
)
async def suspend(request: Request, body: SuspendBody, caller: Caller = Depends(require_flush)) -> Response:
    """Moves programs' device memory to the host, one program after the other, and responds when all are done. A program
    that can't be suspended has the outcome `refused`, with the reason and a remedy.

    404: no matching program allows it and has been idle for long enough.
    """
    core = core_of(request)
    suspender, frame = core.get(Suspender), core.frame
    keys = list(_targets(frame.snapshot, body, caller.uid)) if frame else []
    if not keys:
        raise _nothing_to_suspend(frame.snapshot.reports if frame else (), body.target, caller.uid)
    receipts = [
        await suspender.suspend(
            SuspendRequest(process=key, uid=caller.uid, min_idle_seconds=body.idle_for_seconds),
            caller.name,
            body.dry_run,
        )
        for key in keys
    ]
    return _answer(receipts)


@router.change(
    "POST /resumptions",
    "Resume suspended programs and return receipts",
    Receipts,
    Receipts((EXAMPLE_RESUMPTION,)),
    (404, 422, 503),
)
async def resume(request: Request, body: ResumeBody, caller: Caller = Depends(require_flush)) -> Response:
    """Moves programs' memory back to their devices once it's granted, and responds when all are done.

    A program whose memory isn't available in time stays suspended. 404: no suspended program matches.
    """
    suspender = core_of(request).get(Suspender)
    keys: list[ProcessKey] = [
        key for key, each in suspender.programs.items() if body.target.matches(each.pid, each.workload)
    ]
    if not keys:
        frame = core_of(request).frame
        reports = frame.snapshot.reports if frame else ()
        raise nothing_to_resume(reports, suspender.programs.values(), body.target)
    if body.target.pid is None:
        keys = [key for key in keys if caller.uid in (None, suspender.programs[key].uid)]
    return _answer([await suspender.resume(key, caller.name, caller.uid, body.wait_seconds) for key in keys])


@router.deletion("/resumptions/{pid}", "Cancel a resumption that is waiting for memory", (404, 422))
async def cancel(
    request: Request, pid: Annotated[int, Path(gt=0)], caller: Caller = Depends(require_flush)
) -> Response:
    """The program stays suspended. 404: none of your programs with this pid is waiting."""
    core_of(request).get(Suspender).cancel(pid, caller.name, caller.uid)
    return Response(status_code=204)


@router.read("/suspensions", "Programs that gpumond has suspended", list[SuspendedProgram], [EXAMPLE_PROGRAM])
async def suspensions(request: Request) -> Response:
    return json_response(list[SuspendedProgram], list(core_of(request).get(Suspender).programs.values()))


@router.read(
    "/suspensions/receipts",
    "Receipts of suspensions and resumptions, most recent last",
    list[SuspensionReceipt],
    [EXAMPLE_RECEIPT],
)
async def receipts(request: Request) -> Response:
    """Returns the last 1,000 since the daemon started."""
    return streamed_json(request, SuspensionReceipt, list(core_of(request).get(Suspender).receipts))


def _nothing_to_suspend(reports: Sequence[AgentReport], target: ProgramTarget, uid: int | None) -> NoSuchTarget:
    """Return the error about a request that selects no program."""
    matching = [each for each in reports if target.matches(each.pid, each.workload) and uid in (None, each.uid)]
    if not matching and not target.all:
        return no_agent_error(Target(pid=target.pid, workload=target.workload, uid=uid), reports)
    if not any(each.suspendable for each in matching):
        command = "`gpumond run --suspendable`"
        if target.workload is None:
            return NoSuchTarget(f"no program allows suspension; start one with {command}")
        return NoSuchTarget(f"{target.workload} doesn't allow suspension; restart it with {command}")
    return NoSuchTarget("no matching program that allows suspension has been idle for that long")


def nothing_to_resume(
    reports: Sequence[AgentReport], suspended: Iterable[SuspendedProgram], target: ProgramTarget
) -> NoSuchTarget:
    """Return the error about a request that selects no suspended program."""
    name = target.workload or f"pid {target.pid}"
    if target.all:
        return NoSuchTarget("no program is suspended")
    if any(target.matches(each.pid, each.workload) for each in reports):
        return NoSuchTarget(f"{name} isn't suspended")
    workloads = [*(each.workload for each in reports), *(each.workload for each in suspended)]
    hint = did_you_mean(target.workload or "", workloads) or LIST_PROGRAMS_HINT
    return NoSuchTarget(f"no program that has an agent or is suspended matches {name}{hint}")


def _targets(snapshot: Snapshot, body: SuspendBody, uid: int | None) -> Iterator[ProcessKey]:
    """Yield the programs that a request selects: the one with its pid, else those that allow it and are idle."""
    for report in snapshot.reports:
        if not body.target.matches(report.pid, report.workload):
            continue
        is_idle_long_enough = is_idle(snapshot, report.key, body.idle_for_seconds)
        if body.target.pid is not None or (report.suspendable and uid in (None, report.uid) and is_idle_long_enough):
            yield report.key


def _answer(receipts: list[SuspensionReceipt]) -> Response:
    return json_response(Receipts, Receipts(tuple(receipts)))
