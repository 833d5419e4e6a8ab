"""Read-only routes for parts of the current Frame."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpumond import __version__
from gpumond.api import examples
from gpumond.api.view import view_of
from gpumond.diagnosis.idle import idle_seconds
from gpumond.model.claims import unmapped_by_device
from gpumond.model.conditions import conditions
from gpumond.model.engines import EngineReading
from gpumond.model.frame import Alert, Frame, Ledger, Line, Verdict
from gpumond.model.pools import Receipt
from gpumond.model.process import ProcessKey
from gpumond.model.quota import EffectiveQuota
from gpumond.model.remedies import remedy
from gpumond.model.silences import Silence
from gpumond.model.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot, SourceState
from gpumond.model.verdicts import KINDS
from gpumond.rules import ended
from gpumond.store.audit_chain import AuditEntry

router = APIRouter(prefix="/api/v1", tags=["facts"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHolding:
    """One process on one device: the driver's values, and its shares. Unknown values are null.

    `unmapped_bytes` are counted by allocators while their pages are released (sleep mode); they are not part of
    `used_bytes`. `limit_bytes` is the limit of its allocators, `quota` what its quotas require.
    """

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
    pod_uid: str | None
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
    unmapped_bytes: int | None
    limit_bytes: int | None
    quota: EffectiveQuota | None


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
    """Condition that limits the accuracy of a device's values, or of the machine's, with its remedy.

    `detail` states the process and the reason if the condition concerns one process.
    """

    device_uuid: str | None
    kind: str
    remedy: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFrame:
    """One complete frame. Responses of the other routes are parts of a frame, and may differ by a tick."""

    version: str
    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...]
    alerts: tuple[Alert, ...]
    silences: tuple[Silence, ...]
    processes: tuple[ProcessHolding, ...]
    faults: tuple[StatedFault, ...]
    conditions: tuple[StatedCondition, ...]


def _holding(
    device_uuid: str,
    process: ProcessUsage,
    idle: float | None,
    report: AgentReport | None,
    lines: Iterable[Line],
    snapshot: Snapshot,
) -> ProcessHolding:
    shares: Counter[str] = Counter()
    for line in lines:
        shares[line.share] += line.used_bytes
    return ProcessHolding(
        device_uuid=device_uuid,
        pid=process.pid,
        start_ticks=process.start_ticks,
        comm=process.comm,
        uid=process.uid,
        user=process.user,
        container=process.container,
        container_name=process.container_name,
        pod_name=process.pod_name,
        pod_namespace=process.pod_namespace,
        pod_uid=process.pod_uid,
        unit=process.unit,
        slurm_job=process.slurm_job,
        state=process.state,
        utilization_ratio=process.utilization_ratio,
        idle_seconds=idle,
        orphaned=process.orphaned,
        workload=report.workload if report else "",
        kinds=process.kinds,
        used_bytes=process.used_bytes,
        live_bytes=shares.get("live"),
        cached_bytes=shares.get("cached"),
        stranded_bytes=shares.get("stranded"),
        overhead_bytes=shares.get("overhead"),
        opaque_bytes=shares.get("opaque"),
        unmapped_bytes=unmapped_by_device(report.pools).get(device_uuid) if report else None,
        limit_bytes=snapshot.limits.get((device_uuid, process.key)),
        quota=snapshot.quotas_by_process.get(process.key),
    )


EXAMPLE_HOLDING = _holding(
    examples.UUID, examples.PROCESS, 0.0, examples.REPORT, examples.LEDGER.lines[:4], examples.SNAPSHOT
)
EXAMPLE_STATUS = Status(
    version=__version__,
    started_at=examples.TAKEN_AT - 6,
    uptime_seconds=6.0,
    source=examples.SNAPSHOT.source,
    snapshot_seq=7,
    snapshot_taken_at=examples.TAKEN_AT,
    devices=1,
    devices_up=1,
    agents=1,
    private_pid_namespace=False,
    faults=(),
    conditions=(),
)
EXAMPLE_FRAME = WholeFrame(
    version=__version__,
    snapshot=examples.SNAPSHOT,
    ledger=examples.LEDGER,
    verdicts=(examples.VERDICT,),
    alerts=(examples.ALERT,),
    silences=(),
    processes=(EXAMPLE_HOLDING,),
    faults=(),
    conditions=(),
)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def answer(kind: Any, value: Any) -> Response:
    """Return ``value`` as JSON, without copies or validation."""
    return Response(_adapter(kind).dump_json(value), media_type="application/json")


def answer_once(request: Request, kind: Any, make: Callable[[Frame], Any]) -> Response:
    """Return a part of the current frame as JSON. It is serialized once per frame and route."""
    frame, answers = _frame(request), view_of(request).answers
    name = request.scope["route"].path
    if name not in answers:
        answers[name] = _adapter(kind).dump_json(make(frame))
    return Response(answers[name], media_type="application/json")


def _frame(request: Request) -> Frame:
    frame = view_of(request).frame
    if frame is None:
        raise HTTPException(503, "the first reading is in progress; retry in a second")
    return frame


@router.get(
    "/frame",
    summary="The complete result of the last tick",
    **examples.described(WholeFrame, EXAMPLE_FRAME, 503),
)
async def frame(request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Returns a consistent view of all values. With `If-None-Match`: 304 until the next frame."""
    frame = _frame(request)
    headers = {"ETag": f'"{view_of(request).started_at:.3f}-{frame.snapshot.seq}"', "Cache-Control": "no-cache"}
    if if_none_match == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    whole = answer_once(request, WholeFrame, _whole)
    whole.headers.update(headers)
    return whole


@router.get(
    "/snapshot",
    summary="Values that were read for the last tick",
    **examples.described(Snapshot, examples.SNAPSHOT, 503),
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
    "/engines",
    summary="Newest state of each declared serving engine",
    **examples.described(list[EngineReading], [examples.ENGINE], 503),
)
async def engines(request: Request) -> Response:
    return answer_once(request, list[EngineReading], lambda frame: list(frame.snapshot.engines))


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
    return answer(list[Alert], list(view_of(request).past_alerts()))


@router.get(
    "/audit",
    summary="Audit log of changes and flushes, newest last",
    **examples.described(list[AuditEntry], [examples.AUDIT_ENTRY], 503),
)
async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=100_000)] = 1000) -> Response:
    """Returns the newest entries. Each contains the hash of the previous one; `gpumond audit verify` checks the
    chain."""
    return answer(list[AuditEntry], await view_of(request).audit_entries(limit))


@router.get(
    "/receipts",
    summary="Receipts of flushes, newest last",
    **examples.described(list[Receipt], [examples.RECEIPT], 503),
)
async def receipts(request: Request) -> Response:
    return answer(list[Receipt], list(view_of(request).receipts()))


@router.get("/status", summary="Status of the daemon", **examples.described(Status, EXAMPLE_STATUS, 503))
async def status(request: Request) -> Response:
    snapshot, started_at = _frame(request).snapshot, view_of(request).started_at
    return answer(
        Status,
        Status(
            version=__version__,
            started_at=started_at,
            uptime_seconds=time.time() - started_at,
            source=snapshot.source,
            snapshot_seq=snapshot.seq,
            snapshot_taken_at=snapshot.taken_at,
            devices=len(snapshot.devices),
            devices_up=sum(device.up for device in snapshot.devices),
            agents=len(snapshot.reports),
            private_pid_namespace=snapshot.private_pid_namespace,
            faults=_faults(snapshot),
            conditions=_conditions(snapshot),
        ),
    )


def _whole(frame: Frame) -> WholeFrame:
    return WholeFrame(
        version=__version__,
        snapshot=frame.snapshot,
        ledger=frame.ledger,
        verdicts=frame.verdicts,
        alerts=frame.alerts,
        silences=frame.silences,
        processes=tuple(holdings(frame)),
        faults=_faults(frame.snapshot),
        conditions=_conditions(frame.snapshot),
    )


def _faults(snapshot: Snapshot) -> tuple[StatedFault, ...]:
    return tuple(StatedFault(f.source, f.kind, f.device_uuid, f.detail, remedy(f.kind)) for f in snapshot.faults)


def _conditions(snapshot: Snapshot) -> tuple[StatedCondition, ...]:
    return tuple(
        StatedCondition(each.device_uuid, each.kind, remedy(each.kind), each.detail) for each in conditions(snapshot)
    )


def holdings(frame: Frame) -> Iterator[ProcessHolding]:
    """Yield every process of every device, and every agent's process that the driver does not list."""
    reports = frame.snapshot.reports_by_process
    lines: dict[tuple[str, ProcessKey | None], list[Line]] = {}
    for line in frame.ledger.lines:
        lines.setdefault((line.device_uuid, line.process), []).append(line)
    for device in frame.snapshot.devices:
        for key, process in device.processes_by_key.items():
            own = lines.pop((device.uuid, key), [])
            yield _holding(device.uuid, process, idle_seconds(device, process), reports.get(key), own, frame.snapshot)
    for (uuid, unlisted), own in lines.items():
        if unlisted is not None:
            process = ProcessUsage(pid=unlisted.pid, start_ticks=unlisted.start_ticks, used_bytes=None)
            yield _holding(uuid, process, None, reports.get(unlisted), own, frame.snapshot)
