"""Read-only routes for parts of the current Frame, and for the history of a device or a process."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, inf, isfinite
from typing import Annotated, Any, TypeVar

from fastapi import Header, HTTPException, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from gpumond import __version__
from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import (
    Alert,
    ConditionWithRemedy,
    FaultWithRemedy,
    Frame,
    FullFrame,
    Ledger,
    ProcessHolding,
    Verdict,
    find_device_uuid_in_frame,
)
from gpumond.facts.program import ProcessKey, process_key
from gpumond.facts.shares import SHARES
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot, SourceState
from gpumond.facts.units import accepts
from gpumond.host.machine import MACHINE_NAME
from gpumond.serve import examples
from gpumond.serve.full_frame import REVISION, faults_with_remedies, full_frame, holdings, stated_conditions
from gpumond.serve.identity import Tenant, tenant_frame
from gpumond.serve.responses import problem
from gpumond.serve.routes import Router, core_of, json_response, require_frame
from gpumond.store.table import type_adapter
from gpumond.tick.history import MAX_SAMPLES, SIGNALS, TIERS, History, HistorySignal, SharesPoint

router = Router("facts")

COMPRESSED_FROM_BYTES = 1024
GZIP_LEVEL = 1
ENTRIES_AT_ONCE = 500
"""Entries of a long list that are written in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The daemon's status. `host` is the machine's name; in a pod, it's the node's if `NODE_NAME` is set.

    `store_file` and `agent_socket` are paths on that machine. `runtime_dir` is the directory of the daemon's token and
    `api.sock`, `null` if the command line looks there by default. `url` is the web UI's address, `null` while another
    program uses the port. `revision` is the commit of the daemon's build.
    """

    version: str
    revision: str | None
    config_hash: str
    rules_hash: str
    host: str
    started_at: float
    uptime_seconds: float
    source: SourceState
    snapshot_seq: int
    snapshot_taken_at: float
    devices: int
    devices_up: int
    agents: int
    private_pid_namespace: bool | None
    store_file: str
    agent_socket: str
    runtime_dir: str | None
    url: str | None
    faults: tuple[FaultWithRemedy, ...]
    conditions: tuple[ConditionWithRemedy, ...]


EXAMPLE_STATUS = Status(
    version=__version__,
    revision="8d43ed1f0c5b7a2e9d6f4b3a1c0e8f7d6b5a4c3e",
    config_hash="5d41402abc4b",
    rules_hash="7d793037a076",
    host="gpu-17",
    started_at=examples.TAKEN_AT - 6,
    uptime_seconds=6.0,
    source=examples.SNAPSHOT.source,
    snapshot_seq=7,
    snapshot_taken_at=examples.TAKEN_AT,
    devices=1,
    devices_up=1,
    agents=1,
    private_pid_namespace=False,
    store_file="/var/lib/gpumond/gpumond.db",
    agent_socket="/run/gpumond/agent.sock",
    runtime_dir=None,
    url="http://127.0.0.1:9917",
    faults=(),
    conditions=(),
)
EXAMPLE_FRAME = FullFrame(
    version=__version__,
    revision="8d43ed1f0c5b7a2e9d6f4b3a1c0e8f7d6b5a4c3e",
    host="gpu-17",
    snapshot=examples.SNAPSHOT,
    ledger=examples.LEDGER,
    verdicts=(examples.VERDICT,),
    alerts=(examples.ALERT,),
    silences=(),
    processes=(examples.HOLDING,),
    faults=(),
    conditions=(),
)


def compressed_json(request: Request, kind: Any, value: Any) -> Response:
    """Return ``value`` as JSON, without copies or validation. It is compressed if the reader accepts that."""
    return _json(request, type_adapter(kind).dump_json(value), {})


def streamed_json(request: Request, kind: Any, values: Sequence[Any]) -> Response:
    """Return a list as JSON. A long one is not compressed, and other requests are answered while it is written."""
    if len(values) <= ENTRIES_AT_ONCE:
        return compressed_json(request, list[kind], values)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(values), ENTRIES_AT_ONCE):
            text = type_adapter(list[kind]).dump_json(list(values[start : start + ENTRIES_AT_ONCE]))
            yield (b"," if start else b"[") + text[1:-1]
            await asyncio.sleep(0)
        yield b"]"

    return StreamingResponse(parts(), media_type="application/json")


def cached_json(request: Request, kind: Any, make: Callable[[Frame], Any]) -> Response:
    """Return a part of the current frame as JSON. It is serialized and compressed once per frame and route."""
    responses, name = core_of(request).responses, _response_name(request)
    if name not in responses:
        responses[name] = type_adapter(kind).dump_json(make(current_frame(request)))
    return _json(request, responses[name], responses)


def _response_name(request: Request) -> str:
    """Return the name of a response: its route, and the tenant who sees a part of the frame."""
    tenant = tenant_of(request)
    return str(request.scope["route"].path) + ("" if tenant is None else f" {tenant}")


def _json(request: Request, body: bytes, compressed: dict[str, bytes]) -> Response:
    """Return a response. ``compressed``: bodies that are compressed already, by route."""
    headers = {"Vary": "Accept-Encoding"}
    if len(body) >= COMPRESSED_FROM_BYTES and accepts(request.headers.get("accept-encoding", ""), "gzip"):
        name = f"{_response_name(request)} gzip"
        if name not in compressed:
            compressed[name] = gzip.compress(body, GZIP_LEVEL, mtime=0)
        body, headers["Content-Encoding"] = compressed[name], "gzip"
    return Response(body, headers=headers, media_type="application/json")


def current_frame(request: Request) -> Frame:
    """Return the current frame, of a tenant its own part. Raises 503 before the first one."""
    frame, tenant = require_frame(core_of(request).frame), tenant_of(request)
    return frame if tenant is None else tenant_frame(frame, tenant)


def tenant_of(request: Request) -> Tenant | None:
    """Return the tenant that a proxied request is limited to."""
    tenant: Tenant | None = (request.scope.get("state") or {}).get("tenant")
    return tenant


@router.read("/frame", "The complete result of the last tick", FullFrame, EXAMPLE_FRAME, (503,))
async def frame(request: Request, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """Returns all values of one moment. With `If-None-Match`, you get 304 until the next frame."""
    frame, tenant = require_frame(core_of(request).frame), tenant_of(request)
    part = "" if tenant is None else "-" + sha256(repr((tenant.user, sorted(tenant.namespaces))).encode()).hexdigest()
    etag = f'"{core_of(request).started_at:.3f}-{frame.snapshot.seq}{part}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding"}
    if if_none_match is not None and if_none_match.removeprefix("W/") == etag:
        return Response(status_code=304, headers=headers)
    response = cached_json(request, FullFrame, full_frame)
    if "Content-Encoding" in response.headers:
        headers["ETag"] = f"W/{etag}"  # the same frame in other bytes
    response.headers.update(headers)
    return response


@router.read("/snapshot", "Values that were read for the last tick", Snapshot, examples.SNAPSHOT, (503,))
async def snapshot(request: Request) -> Response:
    return cached_json(request, Snapshot, lambda frame: frame.snapshot)


@router.read("/devices", "Devices and their sensors", list[DeviceReading], [examples.DEVICE], (503,))
async def devices(request: Request) -> Response:
    return cached_json(request, list[DeviceReading], lambda frame: list(frame.snapshot.devices))


@router.read("/processes", "Processes and their shares", list[ProcessHolding], [examples.HOLDING], (503,))
async def processes(request: Request) -> Response:
    return cached_json(request, list[ProcessHolding], lambda frame: list(holdings(frame)))


@router.read("/agents", "Each agent's latest report", list[AgentReport], [examples.REPORT], (503,))
async def agents(request: Request) -> Response:
    return cached_json(request, list[AgentReport], lambda frame: list(frame.snapshot.reports))


@router.read("/agents/{pid}", "One agent's latest report", AgentReport, examples.REPORT, (404, 503))
async def agent(request: Request, pid: Annotated[int, Path(gt=0)]) -> Response:
    found = [report for report in current_frame(request).snapshot.reports if report.pid == pid]
    return json_response(AgentReport, found[0]) if found else problem(404, f"no agent has pid {pid}")


@router.read(
    "/engines", "Latest state of each configured serving engine", list[EngineReading], [examples.ENGINE], (503,)
)
async def engines(request: Request) -> Response:
    return cached_json(request, list[EngineReading], lambda frame: list(frame.snapshot.engines))


@router.read(
    "/ledger",
    "Used memory by process and share. The lines add up to the used bytes plus the overcount",
    Ledger,
    examples.LEDGER,
    (503,),
)
async def ledger(request: Request) -> Response:
    return cached_json(request, Ledger, lambda frame: frame.ledger)


@router.read("/verdicts", "Active verdicts", list[Verdict], [examples.VERDICT], (503,))
async def verdicts(request: Request) -> Response:
    return cached_json(request, list[Verdict], lambda frame: list(frame.verdicts))


@router.read("/alerts", "Pending and firing alerts", list[Alert], [examples.ALERT], (503,))
async def alerts(request: Request) -> Response:
    return cached_json(request, list[Alert], lambda frame: list(frame.alerts))


@router.read("/status", "The daemon's status", Status, EXAMPLE_STATUS, (503,))
async def status(request: Request) -> Response:
    snapshot, started_at = current_frame(request).snapshot, core_of(request).started_at
    hashes, directory = core_of(request).config_hashes(), core_of(request).nonstandard_runtime_dir
    return compressed_json(
        request,
        Status,
        Status(
            version=__version__,
            revision=REVISION,
            config_hash=hashes.settings,
            rules_hash=hashes.rules,
            host=MACHINE_NAME,
            started_at=started_at,
            uptime_seconds=time.time() - started_at,
            source=snapshot.source,
            snapshot_seq=snapshot.seq,
            snapshot_taken_at=snapshot.taken_at,
            devices=len(snapshot.devices),
            devices_up=sum(device.up for device in snapshot.devices),
            agents=len(snapshot.reports),
            private_pid_namespace=snapshot.private_pid_namespace,
            store_file=str(core_of(request).store_file),
            agent_socket=str(core_of(request).agent_socket),
            runtime_dir=None if directory is None else str(directory),
            url=core_of(request).url,
            faults=faults_with_remedies(snapshot),
            conditions=stated_conditions(snapshot),
        ),
    )


@dataclass(frozen=True, slots=True)
class PastValue:
    """Sample, or block that begins at ``at`` (Unix time)."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHistory:
    """One signal, oldest first. The last block is incomplete.

    ``block_seconds`` is the length of a block, null for samples. It differs from ``resolution_seconds`` only in
    `gpumond demo`, where time is accelerated.
    """

    device_uuid: str
    pid: int | None
    signal: HistorySignal
    resolution_seconds: int | None
    block_seconds: float | None
    points: tuple[PastValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHistory:
    """Shares of a device, a process or the machine as columns of the same length, oldest first; unknown is null.

    ``at`` are the Unix times at which the blocks begin. ``used`` is the median of a block's used bytes, and ``low`` and
    ``high`` are the lowest and the highest. ``resolution_seconds`` and ``block_seconds`` are as in one signal's
    history.
    """

    device_uuid: str | None
    pid: int | None
    resolution_seconds: int | None
    block_seconds: float | None
    at: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    used: tuple[float, ...] = ()
    live: tuple[float | None, ...] = ()
    cached: tuple[float | None, ...] = ()
    stranded: tuple[float | None, ...] = ()
    overhead: tuple[float | None, ...] = ()
    opaque: tuple[float | None, ...] = ()
    unattributed: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PastHolding:
    """The shares of a device, or of a process on it, at one time; unknown is null.

    ``name`` is the process's workload, or its command. ``ended_at`` is when the process ended or released all of its
    memory. For a device, ``pid`` is null, and ``name`` is empty. Only devices have ``unattributed_bytes``.
    """

    device_uuid: str
    pid: int | None
    start_ticks: int | None
    name: str
    ended_at: float | None
    used_bytes: float
    live_bytes: float | None
    cached_bytes: float | None
    stranded_bytes: float | None
    overhead_bytes: float | None
    opaque_bytes: float | None
    unattributed_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastHoldings:
    """What each device and each process on it used at one time, devices first.

    ``resolution_seconds`` and ``block_seconds`` are as in one signal's history.
    """

    at: float
    resolution_seconds: int | None
    block_seconds: float | None
    holdings: tuple[PastHolding, ...]


RANGE_SLACK = 1.02
"""Factor by which the range of a resolution may fall short of ``since``."""

EXAMPLE_HISTORY = SeriesHistory(
    device_uuid=examples.UUID,
    pid=examples.PROCESS.pid,
    signal="live",
    resolution_seconds=60,
    block_seconds=60.0,
    points=(
        PastValue(examples.TAKEN_AT - 120, 30.0 * examples.GIB, 30.5 * examples.GIB, 31.0 * examples.GIB),
        PastValue(examples.TAKEN_AT - 60, 30.5 * examples.GIB, 31.0 * examples.GIB, 31.5 * examples.GIB),
    ),
)


EXAMPLE_SHARES = ShareHistory(
    device_uuid=examples.UUID,
    pid=None,
    resolution_seconds=60,
    block_seconds=60.0,
    at=(examples.TAKEN_AT - 60,),
    low=(60.0 * examples.GIB,),
    high=(63.0 * examples.GIB,),
    used=(62.0 * examples.GIB,),
    live=(31.0 * examples.GIB,),
    cached=(22.0 * examples.GIB,),
    stranded=(5.0 * examples.GIB,),
    overhead=(2.0 * examples.GIB,),
    opaque=(2.0 * examples.GIB,),
    unattributed=(0.0,),
)

EXAMPLE_MOMENT = PastHoldings(
    at=examples.TAKEN_AT - 60,
    resolution_seconds=None,
    block_seconds=None,
    holdings=(
        PastHolding(
            device_uuid=examples.UUID,
            pid=examples.PROCESS.pid,
            start_ticks=examples.PROCESS.start_ticks,
            name="train",
            ended_at=None,
            used_bytes=62.0 * examples.GIB,
            live_bytes=31.0 * examples.GIB,
            cached_bytes=24.0 * examples.GIB,
            stranded_bytes=5.0 * examples.GIB,
            overhead_bytes=2.0 * examples.GIB,
            opaque_bytes=None,
            unattributed_bytes=None,
        ),
    ),
)

Pid = Annotated[int | None, Query(ge=1, description="A process on the device; without it, the whole device.")]
StartTicks = Annotated[
    int | None, Query(ge=0, description="The start of the process; without it, the latest process with this pid.")
]
Since = Annotated[float | None, Query(ge=0, description="Start of the range, as Unix time.")]
Until = Annotated[float | None, Query(ge=0, description="End of the range, as Unix time.")]
Resolution = Annotated[float | None, Query(gt=0, le=86400, description="Resolution in seconds.")]


@router.read("/history", "History of a device or a process", SeriesHistory, EXAMPLE_HISTORY, (404, 422))
async def history(
    request: Request,
    uuid: Annotated[str, Query(description="The device: an index, a UUID or a prefix of one, or a PCI address.")],
    pid: Pid = None,
    start_ticks: StartTicks = None,
    signal: Annotated[
        HistorySignal,
        Query(
            description="`utilization`, `unattributed` and `opaque` apply to devices; `live`, `held` and `stranded` "
            "require agents."
        ),
    ] = "used",
    since: Since = None,
    until: Until = None,
    resolution: Resolution = None,
) -> Response:
    """Returns the samples of the last 15 minutes, or blocks (minimum, median, maximum) of 15 s, 1, 5 or 15 minutes.

    By default, you get the finest resolution that reaches back to `since`. The response has at most 901 points.
    """
    history = core_of(request).history
    uuid = find_device_uuid_in_frame(uuid, core_of(request).frame, others=history.devices)
    key = (uuid, _process(history, uuid, pid, start_ticks))
    chosen_resolution = _resolution_for(history, [history.age_seconds(key)], since, resolution)
    points = downsample(history.series(key, signal, since or 0.0, chosen_resolution, _end(until)))
    if not points and not any(history.series(key, other) for other in SIGNALS):
        raise HTTPException(404, f"no history for {uuid if pid is None else f'pid {pid} on {uuid}'}")
    seconds, length = _block_lengths(history, chosen_resolution)
    values = tuple(PastValue(*point) for point in points)
    return compressed_json(
        request,
        SeriesHistory,
        SeriesHistory(
            device_uuid=uuid, pid=pid, signal=signal, resolution_seconds=seconds, block_seconds=length, points=values
        ),
    )


@router.read(
    "/history/shares",
    "History of all shares of a device, a process or the machine",
    ShareHistory,
    EXAMPLE_SHARES,
    (404, 422),
)
async def share_history(
    request: Request,
    uuid: Annotated[
        str | None, Query(description="The device, as for `/api/v1/history`; without it, the sum of all devices.")
    ] = None,
    pid: Pid = None,
    start_ticks: StartTicks = None,
    since: Since = None,
    until: Until = None,
    resolution: Resolution = None,
) -> Response:
    """Returns the used bytes and each share's bytes at each time. Resolutions work as in `/api/v1/history`."""
    history = core_of(request).history
    frame = core_of(request).frame
    if uuid is None:
        if pid is not None:
            raise HTTPException(422, "pid requires uuid")
        devices = frame.snapshot.devices if frame else ()
        uuids = {device.uuid for device in devices}
        roots = [device.uuid for device in devices if device.parent_uuid not in uuids]
        chosen_resolution = _resolution_for(
            history, [history.age_seconds((each, None)) for each in roots], since, resolution
        )
        points = history.machine_shares(roots, since or 0.0, _end(until), chosen_resolution)
    else:
        uuid = find_device_uuid_in_frame(uuid, frame, others=history.devices)
        key = (uuid, _process(history, uuid, pid, start_ticks))
        chosen_resolution = _resolution_for(history, [history.age_seconds(key)], since, resolution)
        points = history.shares(key, since or 0.0, _end(until), chosen_resolution)
    return compressed_json(
        request, ShareHistory, _columns(uuid, pid, downsample(points), *_block_lengths(history, chosen_resolution))
    )


@router.read(
    "/history/moment", "Memory of each device and process at one time", PastHoldings, EXAMPLE_MOMENT, (404, 422)
)
async def past_moment(
    request: Request,
    at: Annotated[float, Query(ge=0, description="The time, as Unix time.")],
    uuid: Annotated[
        str | None, Query(description="The device, as for `/api/v1/history`; without it, all devices.")
    ] = None,
    resolution: Resolution = None,
) -> Response:
    """Returns the shares of each device and process at `at`, including the last 32 processes that ended."""
    history = core_of(request).history
    wanted = None if uuid is None else find_device_uuid_in_frame(uuid, core_of(request).frame, others=history.devices)
    chosen_resolution = _resolution_for(
        history, [history.age_seconds((each, None)) for each in history.devices], at, resolution
    )
    found = tuple(
        PastHolding(
            device_uuid=device,
            pid=process.pid if process else None,
            start_ticks=process.start_ticks if process else None,
            name=series.name,
            ended_at=history.to_unix(series.ended_at) if isfinite(series.ended_at) else None,
            **{f"{share}_bytes": getattr(point, share) for share in ("used", *SHARES)},
        )
        for (device, process), series, point in history.shares_at(at, chosen_resolution)
        if wanted in (None, device)
    )
    if not found:
        raise HTTPException(404, "no history for that time")
    seconds, length = _block_lengths(history, chosen_resolution)
    return compressed_json(
        request,
        PastHoldings,
        PastHoldings(at=at, resolution_seconds=seconds, block_seconds=length, holdings=found),
    )


Each = TypeVar("Each")


def downsample(points: Sequence[Each]) -> Sequence[Each]:
    """Return every n-th point, at most 901 of them: accelerated time has more samples in 15 minutes."""
    return points[:: max(1, ceil((len(points) - 1) / MAX_SAMPLES))]


def _process(history: History, uuid: str, pid: int | None, start_ticks: int | None) -> ProcessKey | None:
    found = (
        history.newest_process(uuid, pid) if pid is not None and start_ticks is None else process_key(pid, start_ticks)
    )
    if pid is not None and found is None:
        raise HTTPException(404, f"no history for pid {pid} on {uuid}")
    return found


def _end(until: float | None) -> float:
    return inf if until is None else until


def _resolution_for(
    history: History, ages: Sequence[float], since: float | None, resolution: float | None
) -> float | None:
    """Return the resolution that is asked for, else the shortest one whose range includes ``since``."""
    if resolution is not None or since is None:
        return resolution
    seconds = min((history.taken_at - since) * history.speedup, max(ages, default=0.0))
    if seconds <= MAX_SAMPLES * history.speedup * RANGE_SLACK:
        return None
    return next(
        (tier.seconds for tier in TIERS if seconds <= tier.seconds * tier.rows * RANGE_SLACK), TIERS[-1].seconds
    )


def _block_lengths(history: History, resolution: float | None) -> tuple[int | None, float | None]:
    """Return a block's length in seconds of the history's clock, and in real seconds; None for samples."""
    lengths = [tier.seconds for tier in TIERS if resolution is not None and tier.seconds <= resolution]
    seconds = max(lengths, default=None)
    return seconds, None if seconds is None else seconds / history.speedup


def _columns(
    uuid: str | None, pid: int | None, points: Sequence[SharesPoint], seconds: int | None, length: float | None
) -> ShareHistory:
    columns = zip(*points, strict=True) if points else ((),) * len(SharesPoint._fields)
    named = dict(zip(SharesPoint._fields, columns, strict=True))
    return ShareHistory(device_uuid=uuid, pid=pid, resolution_seconds=seconds, block_seconds=length, **named)
