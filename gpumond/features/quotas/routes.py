"""HTTP API of quotas, and of requests for device memory: `gpumond run --need` asks whether its program fits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, HTTPException, Path, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from gpumond.config.models import EncodableModel
from gpumond.facts.frame import Frame, find_device_uuid_in_frame
from gpumond.facts.messages import MAX_WORKLOAD_LENGTH
from gpumond.facts.quota import Admission, PlannedFlush
from gpumond.facts.snapshot import STARTING, DeviceReading
from gpumond.facts.units import size_text
from gpumond.features.quotas.admissions import Admissions
from gpumond.features.quotas.quotas import QuotaEntry, QuotaRegistry
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.serve import examples
from gpumond.serve.authentication import Caller
from gpumond.serve.authorization import require_flush, require_rules
from gpumond.serve.routes import Router, core_of, etag_of, json_response, not_ready

admissions_router = Router("admissions")
ADMISSION_EXAMPLE = Admission(
    id="5b1f6a0c9d1e4c7f8a2b3c4d5e6f7a8b",
    state="waiting",
    device_uuid=examples.UUID,
    device_index=0,
    need_bytes=40 * examples.GIB,
    available_bytes=examples.GIB,
    plan=(
        PlannedFlush(pid=4242, start_ticks=examples.START_TICKS, workload="train", reclaimable_bytes=40 * examples.GIB),
    ),
)

RequestId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The `id` of the request.")]


class AdmissionBody(EncodableModel):
    """`device`: an index, a UUID or a prefix of one, or a PCI address; required if there are several devices.

    `pid`: the process that becomes the program, in the daemon's PID namespace. `workload`: its name, for the queue.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"need_bytes": 40 * examples.GIB, "device": "0", "wait": True}]},
    )

    need_bytes: int = Field(gt=0, lt=2**62)
    device: str | None = Field(default=None, min_length=1, max_length=128)
    wait: bool = Field(default=False, description="Queue the request if it doesn't fit now.")
    pid: int | None = Field(default=None, gt=0, lt=2**31)
    workload: str = Field(default="", max_length=MAX_WORKLOAD_LENGTH)


@admissions_router.change(
    "POST /admissions", "Request device memory for a program", Admission, ADMISSION_EXAMPLE, (404, 409, 422, 429, 503)
)
async def request_memory(request: Request, body: AdmissionBody, caller: Caller = Depends(require_flush)) -> Response:
    """Grants the memory if it's available now. Granted memory counts as used until the program has allocated it.

    With `wait`, a request that doesn't fit joins the queue, and the daemon flushes programs for it. Renew it with `PUT`
    at least every 10 s, or it's removed. Without `wait`, its `state` is `refused`, and `plan` contains the flushes that
    would make enough room.

    409: the device is smaller than the request. 422: there are several devices, and `device` is missing. 429: you
    already have 16 requests.
    """
    core = core_of(request)
    admissions, frame = core.get(Admissions), _ready_frame(core.frame)
    device = _find_device(frame, body.device, caller.uid)
    reserved = device.reserved_bytes or 0
    if device.usable_bytes is not None and body.need_bytes > device.usable_bytes:
        note = f" (the driver reserves {size_text(reserved)})" if reserved else ""
        limit = f"GPU {device.index} can provide at most {size_text(device.usable_bytes)}{note}"
        raise HTTPException(409, f"{size_text(body.need_bytes)} requested, but {limit}")
    admission = admissions.request(
        frame.snapshot,
        device,
        body.need_bytes,
        caller.name,
        uid=caller.uid,
        pid=body.pid,
        workload=body.workload,
        wait=body.wait,
    )
    await admissions.save()
    return json_response(Admission, admission)


@admissions_router.change(
    "PUT /admissions/{id}", "Renew a request and return its state", Admission, ADMISSION_EXAMPLE, (404, 422)
)
async def renew(request: Request, id: RequestId, caller: Caller = Depends(require_flush)) -> Response:
    """404: the request wasn't renewed in time or belongs to another user, or its program has allocated the memory."""
    core = core_of(request)
    admissions = core.get(Admissions)
    admission = admissions.renew(core.frame.snapshot if core.frame else None, id, caller.name)
    await admissions.save()
    return json_response(Admission, admission)


@admissions_router.deletion("/admissions/{id}", "Withdraw a request, or release its grant", (404, 422))
async def withdraw(request: Request, id: RequestId, caller: Caller = Depends(require_flush)) -> Response:
    admissions = core_of(request).get(Admissions)
    admissions.cancel(id, caller.name)
    await admissions.save()
    return Response(status_code=204)


def _ready_frame(frame: Frame | None) -> Frame:
    if frame is None or (not frame.snapshot.devices and frame.snapshot.source.reason == STARTING):
        raise not_ready()
    return frame


def _find_device(frame: Frame, name: str | None, uid: int | None) -> DeviceReading:
    """Return the device with that name, or the only one. Raises NoSuchDevice, AmbiguousDevice, HTTPException."""
    if name is None:
        if len(frame.snapshot.devices) != 1:
            count = len(frame.snapshot.devices)
            raise HTTPException(
                422, f"this machine has {count} GPUs; choose one with --need-device, such as --need-device 0"
            )
        return frame.snapshot.devices[0]
    uuid = find_device_uuid_in_frame(name, frame, uid)
    device = frame.snapshot.device(uuid)
    if device is None:
        raise HTTPException(404, f"the driver doesn't list the device {uuid}")
    return device


router = Router("quotas")

QUOTA_BODY_EXAMPLE = {
    "name": "training",
    "match": {"workload": "train-*"},
    "soft_limit": 30 * examples.GIB,
    "limit": 40 * examples.GIB,
}
QUOTA_EXAMPLE = QuotaEntry("training", "api", "3b9d0c5f2a7d1e4c", QUOTA_BODY_EXAMPLE)

IfMatch = Annotated[str | None, Header(description="The expected ETag of the quota; 412 if it has changed.")]


def _registry(request: Request) -> QuotaRegistry:
    return core_of(request).get(QuotaRegistry)


def _entry_response(entry: QuotaEntry) -> Response:
    headers = {"ETag": f'"{entry.etag}"', "Location": f"/api/v1/quotas/{entry.name}"}
    return json_response(QuotaEntry, entry, headers=headers)


@router.read("/quotas", "Quotas in effect, with their origin", list[QuotaEntry], [QUOTA_EXAMPLE])
async def quotas(request: Request) -> Response:
    return json_response(list[QuotaEntry], _registry(request).entries())


@router.read("/quotas/{name}", "One quota, with its ETag", QuotaEntry, QUOTA_EXAMPLE, (404,))
async def quota(request: Request, name: str) -> Response:
    return _entry_response(_registry(request).get(name))


@router.change("PUT /quotas/{name}", "Create or replace a quota", QuotaEntry, QUOTA_EXAMPLE, (409, 412, 422, 503, 507))
async def replace(
    request: Request, name: str, body: QuotaConfig, if_match: IfMatch = None, caller_name: str = Depends(require_rules)
) -> Response:
    """Takes effect within a tick: the daemon sets the limit in all matching programs that allow it.

    409: the quota is defined in the configuration file.
    """
    if body.name != name:
        raise HTTPException(422, f"body.name: {body.name!r} differs from the name in the path, {name!r}")
    return _entry_response(await _registry(request).put(body.quota(), caller_name, etag_of(if_match)))


@router.deletion("/quotas/{name}", "Delete a quota", (404, 409, 412, 503, 507))
async def remove(
    request: Request, name: str, if_match: IfMatch = None, caller_name: str = Depends(require_rules)
) -> Response:
    """Removes the limit from programs in which this quota set it."""
    await _registry(request).delete(name, caller_name, etag_of(if_match))
    return Response(status_code=204)
