"""HTTP API of flushes: flush programs and return the receipts, past receipts, and the webhook of Alertmanager."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gpumond.config.models import EncodableModel
from gpumond.core import FlushService
from gpumond.facts.errors import ConfigError, did_you_mean
from gpumond.facts.flush import MAX_REASON_LENGTH, OPERATION_ID, FlushRequest, FlushResponse, Operation, Target
from gpumond.facts.frame import Frame, find_device_uuid_in_frame
from gpumond.facts.messages import MAX_WORKLOAD_LENGTH
from gpumond.facts.pools import DEFAULT_STEPS, ENGINE_STEP, Receipt, ordered_steps
from gpumond.features.flush.alertmanager_hook import AlertmanagerHook, HookAlert, HookAnswer, HookResult
from gpumond.features.flush.flusher import FlushPart
from gpumond.host.peer import rate_limit_name
from gpumond.serve import examples
from gpumond.serve.authentication import Caller, Tokens, count_at_rate
from gpumond.serve.authorization import require_flush
from gpumond.serve.resources import streamed_json
from gpumond.serve.responses import problem
from gpumond.serve.routes import Router, bearer, core_of, json_response, not_ready, problem_responses

SHARED_TIMEOUT_SECONDS = 60.0
"""Longest timeout for each of several programs, unless an administrator requests it."""

router = Router("flush")
receipts_router = Router("facts")
FLUSH_RESPONSE = TypeAdapter(FlushResponse)
FLUSH_EXAMPLE = FlushResponse("9f0c6a1e5d5e4a5c8f0b7f3f6c1d2e3a", (examples.RECEIPT,), examples.RECEIPT.released_bytes)


class TargetBody(EncodableModel):
    """Exactly one of pid, device (an index, a UUID or a prefix of one, or a PCI address), workload, user (a name or
    uid), all.

    With `start_ticks`, only the process with this pid that started then.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    pid: int | None = Field(default=None, gt=0)
    start_ticks: int | None = Field(default=None, ge=0)
    device: str | None = Field(default=None, min_length=1, max_length=128)
    workload: str | None = Field(default=None, min_length=1, max_length=MAX_WORKLOAD_LENGTH)
    user: str | None = Field(default=None, min_length=1, max_length=128)
    all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> TargetBody:
        if sum(each is not None for each in (self.pid, self.device, self.workload, self.user)) + self.all != 1:
            raise ValueError(
                'pass exactly one of {"pid": N}, {"device": NAME}, {"workload": NAME}, {"user": NAME}, {"all": true}'
            )
        if self.start_ticks is not None and self.pid is None:
            raise ValueError("start_ticks requires pid")
        return self


class OperationBody(EncodableModel):
    """The operation on several machines to which this request belongs. The audit log records it unverified."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(pattern=OPERATION_ID, description="The same on all machines.")
    reason: str = Field(default="", max_length=MAX_REASON_LENGTH)
    by: str = Field(default="", max_length=MAX_REASON_LENGTH, description="Who requests it.")


class FlushBody(EncodableModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"target": {"pid": 4242}, "steps": ["ipc", "cache"], "dry_run": True}]},
    )

    target: TargetBody
    steps: Annotated[tuple[str, ...], AfterValidator(ordered_steps)] = DEFAULT_STEPS
    min_reclaimable_bytes: int = Field(
        default=0, ge=0, strict=True, description="Skip each allocator that would release less."
    )
    dry_run: bool = Field(default=False, strict=True)
    timeout_seconds: float = Field(default=30.0, gt=0, le=600)
    force: bool = Field(
        default=False,
        strict=True,
        description="Ignore the cooldown and, in the `engine` step, a previous release that got no response.",
    )
    plan: str | None = Field(default=None, max_length=64, description="The `id` of the plan that this flush executes.")
    wake: bool = Field(
        default=False, strict=True, description="Undo the last release of the `engine` step, the only one in `steps`."
    )

    operation: OperationBody | None = None

    @model_validator(mode="after")
    def _check_wake(self) -> FlushBody:
        if self.wake and self.steps != (ENGINE_STEP,):
            raise ValueError('wake requires "steps": ["engine"]')
        return self


SUCCESS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": FlushResponse,
        "description": "The flush is complete, and every receipt is final.",
        "content": {"application/json": {"example": FLUSH_RESPONSE.dump_python(FLUSH_EXAMPLE, mode="json")}},
    }
}


@router.post(
    "/flushes",
    summary="Flush programs and return receipts",
    dependencies=[Depends(bearer)],
    responses={**SUCCESS, **problem_responses(401, 403, 404, 409, 422, 429, 503, 504, 507)},
    response_model=None,
)
async def flushes(request: Request, body: FlushBody, caller: Caller = Depends(require_flush)) -> Response:
    """Responds when the flush is complete. If several programs match, those that can't be flushed now are `refused`.

    404: no agent matches, or no device has this name. 409: the process is already being flushed. 429: all matching
    programs are in their cooldown (`force` overrides it), or you have requested too many flushes. 504: an agent didn't
    respond in time; the problem document contains `id`, `receipts` and `released_bytes`. 503, 507: the flush wasn't
    started.
    """
    if not body.dry_run:
        count_flush(request.app.state.tokens, caller)
    core, device = core_of(request), body.target.device
    uuid = None if device is None else find_device_uuid_in_frame(device, core.frame, caller.uid)
    uid = caller.uid if body.target.user is None else uid_named(body.target.user, core.frame, caller.uid)
    resolved = {"device": uuid, "uid": uid, "all": body.target.all or body.target.user is not None}
    target = Target(**body.target.model_dump(exclude={"user"}) | resolved)
    timeout_seconds = body.timeout_seconds
    if not (target.pid or caller.may("admin")):
        timeout_seconds = min(timeout_seconds, SHARED_TIMEOUT_SECONDS)
    fields = body.model_dump(exclude={"target", "timeout_seconds", "operation"})
    operation = Operation(**body.operation.model_dump()) if body.operation else None
    flush = FlushRequest(target=target, timeout_seconds=timeout_seconds, operation=operation, **fields)
    answer = await core.get(FlushService).flush(flush, caller.name)
    unanswered = [receipt.pid for receipt in answer.receipts if receipt.outcome == "timeout"]
    if unanswered:
        detail = f"no response in time from pid {', '.join(map(str, unanswered))}; the other receipts are final"
        return problem(504, detail, **FLUSH_RESPONSE.dump_python(answer, mode="json"))
    return json_response(FlushResponse, answer)


def uid_named(user: str, frame: Frame | None, allowed_uid: int | None) -> int:
    """Return the uid of a user who runs a program on a device. Raises ConfigError.

    ``allowed_uid``: the only user whose programs the caller may flush; None for all.
    """
    devices = frame.snapshot.devices if frame else ()
    uids = {process.user: process.uid for device in devices for process in device.processes or ()}
    uid = int(user) if user.isdecimal() else uids.get(user)
    if uid is None or allowed_uid not in (None, uid):
        hint = did_you_mean(user, filter(None, uids))
        raise ConfigError(f"no program of user {user} uses a GPU{hint or '; to list the users: gpumond status'}")
    return uid


def count_flush(tokens: Tokens, caller: Caller) -> None:
    """Count a request for a flush. Raises 429 after too many by this caller."""
    refusal = "too many flushes by this caller; flush a workload or a device in one request"
    count_at_rate(tokens, tokens.flush_rate, rate_limit_name(caller.name), refusal)


@receipts_router.read("/receipts", "Receipts of flushes, most recent last", list[Receipt], [examples.RECEIPT], (503,))
async def receipts(request: Request) -> Response:
    return streamed_json(request, Receipt, list(core_of(request).get(FlushPart).receipts()))


MAX_ALERTS = 64
MAX_LABELS, MAX_LABEL_LENGTH = 64, 1024

hooks_router = Router("flush")
DATETIME = TypeAdapter(datetime)
RFC_3339 = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$"

FINGERPRINT = "b1f4f0c0d9a3e7c2"
STARTS_AT = "2026-09-21T14:13:20.125Z"
HOOK_BODY_EXAMPLE: dict[str, Any] = {
    "version": "4",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "GpumondReclaimableWaste", "instance": "node7:9917", "uuid": examples.UUID},
            "startsAt": STARTS_AT,
            "fingerprint": FINGERPRINT,
        }
    ],
}
HOOK_EXAMPLE = HookAnswer(
    dry_run=False,
    alerts=(
        HookResult(
            fingerprint=FINGERPRINT,
            alert="GpumondReclaimableWaste",
            starts_at=1_790_000_000.125,
            outcome="flushed",
            pids=(4242,),
            released_bytes=examples.RECEIPT.released_bytes,
        ),
    ),
    receipts=(examples.RECEIPT,),
    released_bytes=examples.RECEIPT.released_bytes,
)


def _check_time(text: str) -> str:
    try:
        DATETIME.validate_python(text).timestamp()
    except (ValidationError, OverflowError, ValueError):
        raise ValueError("expected an RFC 3339 time") from None
    return text


class AlertBody(EncodableModel):
    """One alert. Further keys are ignored."""

    model_config = ConfigDict(strict=True)

    status: Literal["firing", "resolved"]
    labels: dict[str, Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]] = Field(max_length=MAX_LABELS)
    starts_at: Annotated[str, AfterValidator(_check_time)] = Field(alias="startsAt", pattern=RFC_3339, max_length=40)
    fingerprint: str = Field(pattern="^[0-9a-f]{1,32}$")

    def alert(self) -> HookAlert:
        return HookAlert(
            fingerprint=self.fingerprint,
            starts_at=DATETIME.validate_python(self.starts_at).timestamp(),
            firing=self.status == "firing",
            labels=self.labels,
        )


class NotificationBody(EncodableModel):
    """A notification of Alertmanager's webhook, version 4. Further keys are ignored."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [HOOK_BODY_EXAMPLE]})

    version: Literal["4"]
    alerts: list[AlertBody] = Field(max_length=MAX_ALERTS)


@hooks_router.change(
    "POST /hooks/alertmanager",
    "Flush the programs named in Alertmanager's alerts",
    HookAnswer,
    HOOK_EXAMPLE,
    (422, 429, 503, 507),
)
async def alertmanager(
    request: Request,
    body: NotificationBody,
    dry_run: Annotated[Literal["true", "false"], Query(description="Plan, and flush nothing.")] = "false",
    caller: Caller = Depends(require_flush),
) -> Response:
    """Flushes the programs on this machine that firing alerts name with the labels `uuid`, `pid`, `start_ticks`,
    `workload` and `uid`. Responds when all flushes are complete.

    Each firing of an alert triggers one flush; further notifications have the outcome `repeated`. Alerts that are
    resolved, belong to another machine or have no such labels are `skipped`. An alert is `refused` if none of its
    programs can be flushed now; its next notification tries again.

    429: you have requested too many flushes. 503, 507: nothing was flushed.
    """
    core = core_of(request)
    if core.frame is None:
        raise not_ready()
    alerts = [each.alert() for each in body.alerts]
    plan = dry_run == "true"
    if not plan and any(alert.firing for alert in alerts):
        count_flush(request.app.state.tokens, caller)
    answer = await core.get(AlertmanagerHook).receive(alerts, core.frame.snapshot, caller.name, caller.uid, plan)
    return json_response(HookAnswer, answer)
