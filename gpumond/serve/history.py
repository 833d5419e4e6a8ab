"""GET /api/v1/history: samples of one device or one process over the last day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated, TypeVar

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from gpumond.facts.device_names import device_named
from gpumond.facts.process import ProcessKey, process_key
from gpumond.serve import examples
from gpumond.serve.dependencies import kernel_of
from gpumond.serve.resources import answer
from gpumond.tick.history import SAMPLES, SIGNALS, TIERS, History, Shares, Signal

router = APIRouter(prefix="/api/v1", tags=["facts"])


@dataclass(frozen=True, slots=True)
class PastValue:
    """Sample, or block that begins at ``at`` (unix time)."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHistory:
    """One signal, oldest first. The last block is incomplete.

    ``resolution_seconds`` is the resolution of the points, or null for individual samples. ``block_seconds`` is the
    length of a block; it differs from the resolution only in `gpumond demo`, where time is accelerated.
    """

    device_uuid: str
    pid: int | None
    signal: Signal
    resolution_seconds: int | None
    block_seconds: float | None
    points: tuple[PastValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHistory:
    """Shares of a device, a process or the machine as columns of the same length, oldest first; unknown is null.

    ``at`` are unix times; a block begins there. ``used``: the median of its used bytes, and ``low`` and ``high`` their
    limits. ``resolution_seconds`` and ``block_seconds`` are those of one signal's history.
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


SLACK = 1.02
"""Factor by which the range of a resolution may fall short of ``since``."""

EXAMPLE = SeriesHistory(
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


SHARES_EXAMPLE = ShareHistory(
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

Pid = Annotated[int | None, Query(ge=1, description="A process on the device; without it, the whole device.")]
Start = Annotated[
    int | None, Query(ge=0, description="The start of the process; without it, the newest process with this pid.")
]
Since = Annotated[float | None, Query(ge=0, description="Start of the range, as unix time.")]
Until = Annotated[float | None, Query(ge=0, description="End of the range, as unix time.")]
Resolution = Annotated[float | None, Query(gt=0, le=86400, description="Resolution in seconds.")]


@router.get(
    "/history", summary="History of a device or a process", **examples.described(SeriesHistory, EXAMPLE, 404, 422)
)
async def history(
    request: Request,
    uuid: Annotated[str, Query(description="The device: an index, a UUID or a prefix of one, or a PCI address.")],
    pid: Pid = None,
    start_ticks: Start = None,
    signal: Annotated[
        Signal,
        Query(
            description="`utilization`, `unattributed` and `opaque` apply to devices; `live`, `held` and `stranded` "
            "require agents."
        ),
    ] = "used",
    since: Since = None,
    until: Until = None,
    resolution: Resolution = None,
) -> Response:
    """Returns samples of the last 15 minutes, or blocks (minimum, median, maximum) of 15 s, 1, 5 or 15 minutes.

    Blocks have the longest length that does not exceed `resolution`; without it, the shortest length whose range
    includes `since`. The response has at most 901 points. After a restart, the previous day is available in blocks of
    15 minutes.
    """
    known = kernel_of(request).history
    uuid = device_named(uuid, kernel_of(request).frame, others=known.devices)
    key = (uuid, _process(known, uuid, pid, start_ticks))
    fitting = _fitting(known, [known.age(key)], since, resolution)
    points = thinned(known.series(key, signal, since or 0.0, fitting, _end(until)))
    if not points and not any(known.series(key, other) for other in SIGNALS):
        raise HTTPException(404, f"no history of {uuid if pid is None else f'pid {pid} on {uuid}'}")
    seconds, length = _lengths(known, fitting)
    values = tuple(PastValue(*point) for point in points)
    return answer(
        request,
        SeriesHistory,
        SeriesHistory(
            device_uuid=uuid, pid=pid, signal=signal, resolution_seconds=seconds, block_seconds=length, points=values
        ),
    )


@router.get(
    "/history/shares",
    summary="History of all shares of a device, a process or the machine",
    **examples.described(ShareHistory, SHARES_EXAMPLE, 404, 422),
)
async def share_history(
    request: Request,
    uuid: Annotated[
        str | None, Query(description="The device, as for `/api/v1/history`; without it, the sum of all devices.")
    ] = None,
    pid: Pid = None,
    start_ticks: Start = None,
    since: Since = None,
    until: Until = None,
    resolution: Resolution = None,
) -> Response:
    """Returns, at each time, the used bytes and the bytes of each share. Times and resolutions are those of
    `/api/v1/history`. In blocks, a share is the difference of medians.
    """
    known = kernel_of(request).history
    frame = kernel_of(request).frame
    if uuid is None:
        if pid is not None:
            raise HTTPException(422, "pid requires uuid")
        devices = frame.snapshot.devices if frame else ()
        own = {device.uuid for device in devices}
        roots = [device.uuid for device in devices if device.parent_uuid not in own]
        fitting = _fitting(known, [known.age((each, None)) for each in roots], since, resolution)
        points = known.machine(roots, since or 0.0, _end(until), fitting)
    else:
        uuid = device_named(uuid, frame, others=known.devices)
        key = (uuid, _process(known, uuid, pid, start_ticks))
        fitting = _fitting(known, [known.age(key)], since, resolution)
        points = known.shares(key, since or 0.0, _end(until), fitting)
    return answer(request, ShareHistory, _columns(uuid, pid, thinned(points), *_lengths(known, fitting)))


Each = TypeVar("Each")


def thinned(points: Sequence[Each]) -> Sequence[Each]:
    """Return every n-th point, at most 901 of them: accelerated time has more samples in 15 minutes."""
    return points[:: max(1, ceil((len(points) - 1) / SAMPLES))]


def _process(known: History, uuid: str, pid: int | None, start_ticks: int | None) -> ProcessKey | None:
    found = known.newest(uuid, pid) if pid is not None and start_ticks is None else process_key(pid, start_ticks)
    if pid is not None and found is None:
        raise HTTPException(404, f"no history of pid {pid} on {uuid}")
    return found


def _end(until: float | None) -> float:
    return inf if until is None else until


def _fitting(known: History, ages: Sequence[float], since: float | None, resolution: float | None) -> float | None:
    """Return the resolution that is asked for, else the shortest one whose range includes ``since``."""
    if resolution is not None or since is None:
        return resolution
    seconds = min((known.taken_at - since) * known.pace, max(ages, default=0.0))
    if seconds <= SAMPLES * known.pace * SLACK:
        return None
    return next((tier.seconds for tier in TIERS if seconds <= tier.seconds * tier.rows * SLACK), TIERS[-1].seconds)


def _lengths(known: History, resolution: float | None) -> tuple[int | None, float | None]:
    """Return the length of a block on the clock of the history, and in seconds; None for samples."""
    fitting = [tier.seconds for tier in TIERS if resolution is not None and tier.seconds <= resolution]
    seconds = max(fitting, default=None)
    return seconds, None if seconds is None else seconds / known.pace


def _columns(
    uuid: str | None, pid: int | None, points: Sequence[Shares], seconds: int | None, length: float | None
) -> ShareHistory:
    columns = zip(*points, strict=True) if points else ((),) * len(Shares._fields)
    named = dict(zip(Shares._fields, columns, strict=True))
    return ShareHistory(device_uuid=uuid, pid=pid, resolution_seconds=seconds, block_seconds=length, **named)
