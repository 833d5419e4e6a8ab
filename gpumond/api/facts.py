"""The read routes: parts of the current Frame, as they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter

from gpumond import __version__
from gpumond.api import examples
from gpumond.api.problems import responses
from gpumond.audit import AuditEntry
from gpumond.model import (
    AgentReport,
    Alert,
    DeviceReading,
    Fault,
    Frame,
    Ledger,
    Line,
    Receipt,
    Snapshot,
    SourceState,
    Verdict,
)
from gpumond.rules.preview import PastAlert

router = APIRouter(tags=["facts"])


@dataclass(frozen=True, slots=True)
class ProcessHolding:
    """One process on one device: what the driver counts, and its shares. Unknown is null."""

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
    workload: str
    kinds: tuple[str, ...]
    used_bytes: int | None
    live_bytes: int | None
    cached_bytes: int | None
    stranded_bytes: int | None
    overhead_bytes: int | None
    opaque_bytes: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """How the daemon itself is doing."""

    version: str
    started_at: float
    uptime_seconds: float
    source: SourceState
    snapshot_seq: int
    snapshot_taken_at: float
    devices: int
    devices_up: int
    agents: int
    faults: tuple[Fault, ...]


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
    examples.REPORT.workload,
    examples.PROCESS.kinds,
    examples.PROCESS.used_bytes,
    *(*(line.used_bytes for line in examples.LEDGER.lines[:4]), None),
)
EXAMPLE_STATUS = Status(
    __version__, examples.TAKEN_AT - 6, 6.0, examples.SNAPSHOT.source, 7, examples.TAKEN_AT, 1, 1, 1, ()
)


def _json(kind: Any, example: Any) -> dict[str, Any]:
    """Keyword arguments of a route that answers ``kind``: its schema and an example for OpenAPI."""
    content = {"application/json": {"example": TypeAdapter(kind).dump_python(example, mode="json")}}
    return {"response_model": None, "responses": {200: {"model": kind, "content": content}, **responses(503)}}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def answer(kind: Any, value: Any) -> Response:
    """``value`` as JSON; no copies, no second validation: the types are already right."""
    return Response(_adapter(kind).dump_json(value), media_type="application/json")


def _frame(request: Request) -> Frame:
    frame: Frame | None = request.app.state.view.frame
    if frame is None:
        raise HTTPException(503, "the first reading is under way; try again in a second")
    return frame


@router.get("/snapshot", summary="All facts of the last tick", **_json(Snapshot, examples.SNAPSHOT))
async def snapshot(request: Request) -> Response:
    return answer(Snapshot, _frame(request).snapshot)


@router.get("/devices", summary="Devices and their sensors", **_json(list[DeviceReading], [examples.DEVICE]))
async def devices(request: Request) -> Response:
    return answer(list[DeviceReading], list(_frame(request).snapshot.devices))


@router.get("/processes", summary="Processes and their shares", **_json(list[ProcessHolding], [EXAMPLE_HOLDING]))
async def processes(request: Request) -> Response:
    return answer(list[ProcessHolding], list(holdings(_frame(request))))


@router.get("/agents", summary="The newest report of each agent", **_json(list[AgentReport], [examples.REPORT]))
async def agents(request: Request) -> Response:
    return answer(list[AgentReport], list(_frame(request).snapshot.reports))


@router.get("/ledger", summary="Who holds what; lines sum to used + overcount", **_json(Ledger, examples.LEDGER))
async def ledger(request: Request) -> Response:
    return answer(Ledger, _frame(request).ledger)


@router.get("/verdicts", summary="Verdicts that stand", **_json(list[Verdict], [examples.VERDICT]))
async def verdicts(request: Request) -> Response:
    return answer(list[Verdict], list(_frame(request).verdicts))


@router.get("/alerts", summary="Pending and firing alerts", **_json(list[Alert], [examples.ALERT]))
async def alerts(request: Request) -> Response:
    return answer(list[Alert], list(_frame(request).alerts))


@router.get(
    "/alerts/history",
    summary="Alerts that fired and are over, newest last",
    **_json(list[PastAlert], [PastAlert(examples.ALERT, examples.TAKEN_AT)]),
)
async def alert_history(request: Request) -> Response:
    return answer(list[PastAlert], list(request.app.state.view.past_alerts()))


@router.get("/audit", summary="Changes and flushes, newest last", **_json(list[AuditEntry], [examples.AUDIT_ENTRY]))
async def audit(request: Request, limit: Annotated[int, Query(ge=1, le=100_000)] = 1000) -> Response:
    """Each entry holds the hash of the one before; `gpumond audit verify` checks them on the machine itself."""
    return answer(list[AuditEntry], await request.app.state.view.audit_entries(limit))


@router.get("/receipts", summary="Receipts of flushes, newest last", **_json(list[Receipt], [examples.RECEIPT]))
async def receipts(request: Request) -> Response:
    return answer(list[Receipt], list(request.app.state.view.receipts()))


@router.get("/status", summary="How the daemon itself is doing", **_json(Status, EXAMPLE_STATUS))
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
            seen.faults,
        ),
    )


def holdings(frame: Frame) -> Iterator[ProcessHolding]:
    """Every process of every device, and every agent's process that the driver does not list."""
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
                report.workload if report else "",
                process.kinds,
                process.used_bytes,
                *_shares(own),
            )
    for (uuid, pid), own in lines.items():
        if pid is not None:
            start = next((r.start_ticks for r in frame.snapshot.reports if r.pid == pid), None)
            workload = own[0].workload
            nothing = (None,) * 10
            yield ProcessHolding(uuid, pid, start, *nothing, workload, (), None, *_shares(own))


def _shares(lines: Iterable[Line]) -> Iterator[int | None]:
    sums: dict[str, int] = {}
    for line in lines:
        sums[line.share] = sums.get(line.share, 0) + line.used_bytes
    return (sums.get(share) for share in ("live", "cached", "stranded", "overhead", "opaque"))
