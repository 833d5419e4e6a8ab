"""Read-only routes for parts of the current Frame."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpumond import __version__
from gpumond.api import examples
from gpumond.diagnosis.idle import idle_seconds
from gpumond.model.conditions import conditions
from gpumond.model.frame import Alert, Frame, Ledger, Line, Verdict
from gpumond.model.pools import Receipt
from gpumond.model.remedies import remedy
from gpumond.model.snapshot import AgentReport, DeviceReading, Snapshot, SourceState
from gpumond.model.verdicts import KINDS
from gpumond.rules import ended
from gpumond.store.audit_chain import AuditEntry

router = APIRouter(tags=["facts"])


@dataclass(frozen=True, slots=True)
class ProcessHolding:
    """One process on one device: the driver's value, and its shares. Unknown values are null."""

    device_uuid: str
    pid: int
    start_ticks: int | None
    comm: str | None
    uid: int | None
    user: str | None
    container: str | None
    container_name: str | None
    pod_name: str | None
    pod_namespace: str | None
    unit: str | None
    slurm_job: str | None
    state: str | None
    utilization_ratio: float | None
    idle_seconds: float | None
    orphaned: bool | None
    workload: str
    kinds: tuple[str, ...]
    used_bytes: int | None
    live_bytes: int | None
    cached_bytes: int | None
    stranded_bytes: int | None
    overhead_bytes: int | None
    opaque_bytes: int | None


@dataclass(frozen=True, slots=True)
class StatedFault:
    """Failure to read a value, with its remedy."""

    source: str
    kind: str
    device_uuid: str | None
    detail: str
    remedy: str


@dataclass(frozen=True, slots=True)
class StatedCondition:
    """Condition that limits the accuracy of a device's values, or of the machine's, with its remedy."""

    device_uuid: str | None
    kind: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Status:
    """Status of the daemon."""

    version: str
    started_at: float
    uptime_seconds: float
    source: SourceState
    snapshot_seq: int
    snapshot_taken_at: float
    devices: int
    devices_up: int
    agents: int
    private_pid_namespace: bool | None
    faults: tuple[StatedFault, ...]
    conditions: tuple[StatedCondition, ...]


@dataclass(frozen=True, slots=True)
class WholeFrame:
    """One complete frame. Responses of the other routes are parts of a frame, and may differ by a tick."""

    version: str
    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...]
    alerts: tuple[Alert, ...]
    processes: tuple[ProcessHolding, ...]
    faults: tuple[StatedFault, ...]
    conditions: tuple[StatedCondition, ...]


EXAMPLE_HOLDING = ProcessHolding(
    examples.UUID,
    examples.PROCESS.pid,
    examples.PROCESS.start_ticks,
    examples.PROCESS.comm,
    examples.PROCESS.uid,
    None,
    None,
    None,
    None,
    None,
    None,
    None,
    "alive",
    0.97,
    0.0,
    False,
    examples.REPORT.workload,
    examples.PROCESS.kinds,
    examples.PROCESS.used_bytes,
    *(*(line.used_bytes for line in examples.LEDGER.lines[:4]), None),
)
EXAMPLE_STATUS = Status(
    __version__, examples.TAKEN_AT - 6, 6.0, examples.SNAPSHOT.source, 7, examples.TAKEN_AT, 1, 1, 1, False, (), ()
)
EXAMPLE_FRAME = WholeFrame(
    __version__,
    examples.SNAPSHOT,
    examples.LEDGER,
    (examples.VERDICT,),
    (examples.ALERT,),
    (EXAMPLE_HOLDING,),
    (),
    (),
)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def answer(kind: Any, value: Any) -> Response:
    """Return ``value`` as JSON, without copies or validation."""
    return Response(_adapter(kind).dump_json(value), media_type="application/json")


def answer_once(request: Request, kind: Any, make: Callable[[Frame], Any]) -> Response:
    """Return a part of the current frame as JSON. It is serialized once per frame and route."""
    frame, answers = _frame(request), request.app.state.view.answers
    name = request.scope["route"].path
    if name not in answers:
        answers[name] = _adapter(kind).dump_json(make(frame))
    return Response(answers[name], media_type="application/json")


def _frame(request: Request) -> Frame:
    frame: Frame | None = request.app.state.view.frame
    if frame is None:
        raise HTTPException(503, "the first reading is in progress; retry in a second")
    return frame


@router.get(
    "/frame",
    summary="One complete frame: observations and conclusions",
    **examples.described(WholeFrame, EXAMPLE_FRAME, 503),
)
async def frame(request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Returns a consistent view of all values. With `If-None-Match`: 304 until the next frame."""
    seen = _frame(request)
    headers = {"ETag": f'"{request.app.state.view.started_at:.3f}-{seen.snapshot.seq}"', "Cache-Control": "no-cache"}
    if if_none_match == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    whole = answer_once(request, WholeFrame, _whole)
    whole.headers.update(headers)
    return whole


@router.get(
    "/snapshot", summary="Observations of the last tick", **examples.described(Snapshot, examples.SNAPSHOT, 503)
)
async def snapshot(request: Request) -> Response:
    return answer_once(request, Snapshot, lambda frame: frame.snapshot)


@router.get(
    "/devices", summary="Devices and their sensors", **examples.described(list[DeviceReading], [examples.DEVICE], 503)
)
async def devices(request: Request) -> Response:
    return answer_once(request, list[DeviceReading], lambda frame: list(frame.snapshot.devices))


@router.get(
    "/processes",
    summary="Processes and their shares",
    **examples.described(list[ProcessHolding], [EXAMPLE_HOLDING], 503),
)
async def processes(request: Request) -> Response:
    return answer_once(request, list[ProcessHolding], lambda frame: list(holdings(frame)))


@router.get(
    "/agents", summary="Latest report of each agent", **examples.described(list[AgentReport], [examples.REPORT], 503)
)
async def agents(request: Request) -> Response:
    return answer_once(request, list[AgentReport], lambda frame: list(frame.snapshot.reports))


@router.get(
    "/ledger",
    summary="Shares of used memory by owner; lines sum to used + overcount",
    **examples.described(Ledger, examples.LEDGER, 503),
)
async def ledger(request: Request) -> Response:
    return answer_once(request, Ledger, lambda frame: frame.ledger)


@router.get(
    "/verdicts",
    summary="Active verdicts",
    description="\n".join(f"- `{kind.name}`: {kind.meaning}" for kind in KINDS),
    **examples.described(list[Verdict], [examples.VERDICT], 503),
)
async def verdicts(request: Request) -> Response:
    return answer_once(request, list[Verdict], lambda frame: list(frame.verdicts))


@router.get("/alerts", summary="Pending and firing alerts", **examples.described(list[Alert], [examples.ALERT], 503))
async def alerts(request: Request) -> Response:
    return answer_once(request, list[Alert], lambda frame: list(frame.alerts))


@router.get(
    "/alerts/history",
    summary="Resolved alerts, newest last",
    **examples.described(list[Alert], [ended(examples.ALERT, examples.TAKEN_AT)], 503),
)
async def alert_history(request: Request) -> Response:
    """Returns the last thousand resolved alerts, including those before a restart. Active alerts are in `/alerts`."""
    return answer(list[Alert], list(request.app.state.view.past_alerts()))


@router.get(
    "/audit",
    summary="Audit log of changes and flushes, newest last",
    **examples.described(list[AuditEntry], [examples.AUDIT_ENTRY], 503),
)
async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=100_000)] = 1000) -> Response:
    """Returns the newest entries. Each contains the hash of the previous one; `gpumond audit verify` checks the
    chain."""
    return answer(list[AuditEntry], await request.app.state.view.audit_entries(limit))


@router.get(
    "/receipts",
    summary="Receipts of flushes, newest last",
    **examples.described(list[Receipt], [examples.RECEIPT], 503),
)
async def receipts(request: Request) -> Response:
    return answer(list[Receipt], list(request.app.state.view.receipts()))


@router.get("/status", summary="Status of the daemon", **examples.described(Status, EXAMPLE_STATUS, 503))
async def status(request: Request) -> Response:
    frame, started_at = _frame(request), request.app.state.view.started_at
    seen = frame.snapshot
    return answer(
        Status,
        Status(
            __version__,
            started_at,
            time.time() - started_at,
            seen.source,
            seen.seq,
            seen.taken_at,
            len(seen.devices),
            sum(device.up for device in seen.devices),
            len(seen.reports),
            seen.private_pid_namespace,
            _faults(seen),
            _conditions(seen),
        ),
    )


def _whole(frame: Frame) -> WholeFrame:
    parts = (frame.snapshot, frame.ledger, frame.verdicts, frame.alerts, tuple(holdings(frame)))
    return WholeFrame(__version__, *parts, _faults(frame.snapshot), _conditions(frame.snapshot))


def _faults(snapshot: Snapshot) -> tuple[StatedFault, ...]:
    return tuple(StatedFault(f.source, f.kind, f.device_uuid, f.detail, remedy(f.kind)) for f in snapshot.faults)


def _conditions(snapshot: Snapshot) -> tuple[StatedCondition, ...]:
    return tuple(StatedCondition(*each, remedy(each.kind)) for each in conditions(snapshot))


def holdings(frame: Frame) -> Iterator[ProcessHolding]:
    """Yield every process of every device, and every agent's process that the driver does not list."""
    workloads = {(report.pid, report.start_ticks): report for report in frame.snapshot.reports}
    lines: dict[tuple[str, int | None], list[Line]] = {}
    for line in frame.ledger.lines:
        lines.setdefault((line.device_uuid, line.pid), []).append(line)
    for device in frame.snapshot.devices:
        for process in device.processes or ():
            own = lines.pop((device.uuid, process.pid), [])
            report = workloads.get((process.pid, process.start_ticks or 0))
            yield ProcessHolding(
                device.uuid,
                process.pid,
                process.start_ticks,
                process.comm,
                process.uid,
                process.user,
                process.container,
                process.container_name,
                process.pod_name,
                process.pod_namespace,
                process.unit,
                process.slurm_job,
                process.state,
                process.utilization_ratio,
                idle_seconds(device, process),
                process.orphaned,
                report.workload if report else "",
                process.kinds,
                process.used_bytes,
                *_shares(own),
            )
    for (uuid, pid), own in lines.items():
        if pid is not None:
            start = next((r.start_ticks for r in frame.snapshot.reports if r.pid == pid), None)
            workload = own[0].workload
            nothing = (None,) * 13
            yield ProcessHolding(uuid, pid, start, *nothing, workload, (), None, *_shares(own))


def _shares(lines: Iterable[Line]) -> Iterator[int | None]:
    sums: dict[str, int] = {}
    for line in lines:
        sums[line.share] = sums.get(line.share, 0) + line.used_bytes
    return (sums.get(share) for share in ("live", "cached", "stranded", "overhead", "opaque"))
