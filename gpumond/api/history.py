"""What was seen of one device or one process in the last day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from gpumond.api import examples
from gpumond.api.device_lookup import device_named
from gpumond.api.resources import answer, described
from gpumond.history import SIGNALS, History, Signal
from gpumond.history.series import SAMPLES, TIERS

router = APIRouter(tags=["facts"])


@dataclass(frozen=True, slots=True)
class PastValue:
    """A block that begins at ``at`` (unix time), or a sample."""

    at: float
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class SeriesHistory:
    """One signal, oldest first. The last block has not ended yet.

    ``resolution_seconds`` is that of the points: null for samples as they were taken. ``block_seconds`` is the length
    of a block: the same, but for `gpumond demo`, where time is accelerated.
    """

    device_uuid: str
    pid: int | None
    signal: Signal
    resolution_seconds: int | None
    block_seconds: float | None
    points: tuple[PastValue, ...]


SLACK = 1.02
"""A resolution reaches back far enough if it falls short by no more than this factor."""

EXAMPLE = SeriesHistory(
    examples.UUID,
    examples.PROCESS.pid,
    "live",
    60,
    60.0,
    (
        PastValue(examples.TAKEN_AT - 120, 30.0 * examples.GIB, 30.5 * examples.GIB, 31.0 * examples.GIB),
        PastValue(examples.TAKEN_AT - 60, 30.5 * examples.GIB, 31.0 * examples.GIB, 31.5 * examples.GIB),
    ),
)


@router.get("/history", summary="What was seen of a device or a process", **described(SeriesHistory, EXAMPLE, 404, 422))
async def history(
    request: Request,
    uuid: Annotated[str, Query(description="The device: an index, a UUID or its beginning, or a PCI address.")],
    pid: Annotated[int | None, Query(ge=1, description="Of a process on it; without, the device as a whole.")] = None,
    signal: Annotated[
        Signal, Query(description="`utilization` and `unclaimed` are of devices, `live` and `held` need agents.")
    ] = "used",
    since: Annotated[float | None, Query(ge=0, description="Unix time.")] = None,
    resolution: Annotated[float | None, Query(gt=0, le=86400, description="Seconds.")] = None,
) -> Response:
    """Samples of the last 15 minutes, or blocks (lowest, median, highest value) of 15 s, 1, 5 or 15 minutes, the
    longest that are not longer than `resolution`; without it, the shortest that reach back to `since`. At most 901
    points. After a restart the day before is there in blocks of 15 minutes."""
    known: History = request.app.state.view.history
    uuid = device_named(uuid, request.app.state.view.frame, others=known.devices)
    if resolution is None and since is not None:
        resolution = _reaching(min((known.taken_at - since) * known.pace, known.age(uuid, pid)))
    points = known.series(uuid, pid, signal, since or 0.0, resolution)
    if not points and not any(known.series(uuid, pid, other) for other in SIGNALS):
        raise HTTPException(404, f"nothing is known of {uuid if pid is None else f'pid {pid} on {uuid}'}")
    fitting = [tier.seconds for tier in TIERS if resolution is not None and tier.seconds <= resolution]
    seconds = max(fitting, default=None)
    length = None if seconds is None else seconds / known.pace
    values = tuple(PastValue(*point) for point in points)
    return answer(SeriesHistory, SeriesHistory(uuid, pid, signal, seconds, length, values))


def _reaching(seconds: float) -> float | None:
    if seconds <= SAMPLES * SLACK:
        return None
    return next((tier.seconds for tier in TIERS if seconds <= tier.seconds * tier.rows * SLACK), TIERS[-1].seconds)
