"""POST /api/v1/hooks/alertmanager: flush the programs that alerts of Alertmanager name."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gpumond.config.models import Encodable
from gpumond.features.flush.hook import AlertmanagerHook, HookAlert, HookAnswer, HookResult
from gpumond.features.flush.routes import count_flush
from gpumond.serve import examples
from gpumond.serve.auth import Caller
from gpumond.serve.dependencies import CHANGES, kernel_of, require_flush

MAX_ALERTS = 64
MAX_LABELS, MAX_LABEL = 64, 1024

router = APIRouter(prefix="/api/v1", tags=["flush"])
ANSWER = TypeAdapter(HookAnswer)
TIME = TypeAdapter(datetime)
RFC_3339 = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$"

FINGERPRINT = "b1f4f0c0d9a3e7c2"
STARTS_AT = "2026-09-21T14:13:20.125Z"
EXAMPLE_BODY: dict[str, Any] = {
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
EXAMPLE = HookAnswer(
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


def _time(text: str) -> str:
    try:
        TIME.validate_python(text).timestamp()
    except (ValidationError, OverflowError, ValueError):
        raise ValueError("expected a time in the form of RFC 3339") from None
    return text


class AlertBody(Encodable):
    """One alert. Further keys are ignored."""

    model_config = ConfigDict(strict=True)

    status: Literal["firing", "resolved"]
    labels: dict[str, Annotated[str, Field(max_length=MAX_LABEL)]] = Field(max_length=MAX_LABELS)
    starts_at: Annotated[str, AfterValidator(_time)] = Field(alias="startsAt", pattern=RFC_3339, max_length=40)
    fingerprint: str = Field(pattern="^[0-9a-f]{1,32}$")

    def alert(self) -> HookAlert:
        return HookAlert(
            fingerprint=self.fingerprint,
            starts_at=TIME.validate_python(self.starts_at).timestamp(),
            firing=self.status == "firing",
            labels=self.labels,
        )


class NotificationBody(Encodable):
    """A notification of Alertmanager's webhook, version 4. Further keys are ignored."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [EXAMPLE_BODY]})

    version: Literal["4"]
    alerts: list[AlertBody] = Field(max_length=MAX_ALERTS)


@router.post(
    "/hooks/alertmanager",
    summary="Flush the programs that alerts of Alertmanager name",
    dependencies=CHANGES,
    **examples.described(HookAnswer, EXAMPLE, 401, 403, 422, 429, 503, 507),
)
async def alertmanager(
    request: Request,
    body: NotificationBody,
    dry_run: Annotated[Literal["true", "false"], Query(description="Plan, and flush nothing.")] = "false",
    caller: Caller = Depends(require_flush),
) -> Response:
    """Flushes the programs on this machine that the labels `uuid`, `pid`, `start_ticks`, `workload` and `uid` of firing
    alerts name, and responds when all flushes are complete.

    An alert that starts once is flushed once for each caller: another notification has the outcome `repeated`. Alerts
    that are resolved, of other machines, or without such labels have the outcome `skipped`, with the reason. An alert
    has the outcome `refused` if none of its programs could be flushed now; its next notification tries again. The wait
    after a flush is that of rules (`flush_cooldown`).

    429: too many flushes by this caller. 503, 507: nothing was flushed, because it cannot be recorded, or because the
    devices have not been read yet.
    """
    kernel = kernel_of(request)
    if kernel.frame is None:
        raise HTTPException(503, "the first reading is in progress; retry in a second", {"Retry-After": "1"})
    alerts = [each.alert() for each in body.alerts]
    plan = dry_run == "true"
    if not plan and any(alert.firing for alert in alerts):
        count_flush(request.app.state.tokens, caller)
    answer = await kernel.get(AlertmanagerHook).receive(alerts, kernel.frame.snapshot, caller.name, caller.uid, plan)
    return Response(ANSWER.dump_json(answer), media_type="application/json")
