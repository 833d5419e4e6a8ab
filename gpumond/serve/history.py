"""GET /api/v1/history: samples of one device or one process over the last day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from gpumond.facts.device_names import device_named
from gpumond.facts.process import process_key
from gpumond.serve import examples
from gpumond.serve.dependencies import kernel_of
from gpumond.serve.resources import answer
from gpumond.tick.history import SAMPLES, SIGNALS, TIERS, Signal

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


@router.get(
    "/history", summary="History of a device or a process", **examples.described(SeriesHistory, EXAMPLE, 404, 422)
)
async def history(
    request: Request,
    uuid: Annotated[str, Query(description="The device: an index, a UUID or a prefix of one, or a PCI address.")],
    pid: Annotated[
        int | None, Query(ge=1, description="A process on the device; without it, the whole device.")
    ] = None,
    start_ticks: Annotated[
        int | None,
        Query(ge=0, description="The start of the process; without it, the newest process with this pid."),
    ] = None,
    signal: Annotated[
        Signal, Query(description="`utilization` and `unattributed` apply to devices; `live` and `held` require agents.")
    ] = "used",
    since: Annotated[float | None, Query(ge=0, description="Start of the range, as unix time.")] = None,
    resolution: Annotated[float | None, Query(gt=0, le=86400, description="Resolution in seconds.")] = None,
) -> Response:
    """Returns samples of the last 15 minutes, or blocks (minimum, median, maximum) of 15 s, 1, 5 or 15 minutes.

    Blocks have the longest length that does not exceed `resolution`; without it, the shortest length whose range
    includes `since`. The response has at most 901 points. After a restart, the previous day is available in blocks of
    15 minutes.
    """
    known = kernel_of(request).history
    uuid = device_named(uuid, kernel_of(request).frame, others=known.devices)
    process = known.newest(uuid, pid) if pid is not None and start_ticks is None else process_key(pid, start_ticks)
    if pid is not None and process is None:
        raise HTTPException(404, f"no history of pid {pid} on {uuid}")
    key = (uuid, process)
    if resolution is None and since is not None:
        resolution = _resolution_for(min((known.taken_at - since) * known.pace, known.age(key)))
    points = known.series(key, signal, since or 0.0, resolution)
    if not points and not any(known.series(key, other) for other in SIGNALS):
        raise HTTPException(404, f"no history of {uuid if pid is None else f'pid {pid} on {uuid}'}")
    fitting = [tier.seconds for tier in TIERS if resolution is not None and tier.seconds <= resolution]
    seconds = max(fitting, default=None)
    length = None if seconds is None else seconds / known.pace
    values = tuple(PastValue(*point) for point in points)
    return answer(
        request,
        SeriesHistory,
        SeriesHistory(
            device_uuid=uuid, pid=pid, signal=signal, resolution_seconds=seconds, block_seconds=length, points=values
        ),
    )


def _resolution_for(seconds: float) -> float | None:
    if seconds <= SAMPLES * SLACK:
        return None
    return next((tier.seconds for tier in TIERS if seconds <= tier.seconds * tier.rows * SLACK), TIERS[-1].seconds)
