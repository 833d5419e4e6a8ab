"""HTTP API of the memory that a workload needed in its earlier runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import HTTPException, Query, Request
from fastapi.responses import Response

from gpumond.facts.frame import find_device_uuid_in_frame
from gpumond.features.fit.run_peaks import AutoNeed, RunPeaks
from gpumond.serve import examples
from gpumond.serve.routes import Router, core_of, json_response

router = Router("admissions")
EXAMPLE = AutoNeed(
    workload="train",
    device_name="NVIDIA H100 80GB HBM3",
    world_size=1,
    runs=5,
    need_bytes=42 * examples.GIB,
    largest_bytes=41 * examples.GIB,
)

Workload = Annotated[str, Query(min_length=1, max_length=128)]
Device = Annotated[str | None, Query(min_length=1, max_length=128, description="As in admissions.")]
WorldSize = Annotated[int, Query(ge=1, le=1 << 20)]
Uid = Annotated[int | None, Query(ge=0, lt=2**32, description="Only the runs of this user.")]


@router.read("/need", "Memory that a workload needed in its earlier runs", AutoNeed, EXAMPLE, (404, 409, 422, 503))
async def need(
    request: Request, workload: Workload, device: Device = None, world_size: WorldSize = 1, uid: Uid = None
) -> Response:
    """Returns the highest peak of its runs on this device model or, if that is larger, the 95% prediction bound.

    `need_bytes` is null with fewer than three runs. Runs that ended with an out-of-memory error don't count.
    """
    core = core_of(request)
    if core.frame is None or not core.frame.snapshot.devices:
        raise HTTPException(503, "no device has been read yet; retry in a second")
    devices = core.frame.snapshot.devices
    if device is not None:
        uuid = find_device_uuid_in_frame(device, core.frame, None)
        named_device = core.frame.snapshot.device(uuid)
        names = {named_device.name} if named_device else set()
    else:
        names = {each.name for each in devices}
    if len(names) != 1:
        raise HTTPException(422, "device: this machine has several GPU models; name one of its GPUs")
    return json_response(AutoNeed, core.get(RunPeaks).need(workload, names.pop(), world_size, uid))
