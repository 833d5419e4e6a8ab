"""HTTP API of alerts that have been resolved, and test messages to receivers."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request
from fastapi.responses import Response

from gpumond.facts.alerts import as_resolved
from gpumond.facts.frame import Alert
from gpumond.features.alerts.dispatcher import AlertsPart, ReceiverTest
from gpumond.serve import examples
from gpumond.serve.authentication import count_at_rate
from gpumond.serve.authorization import require_rules
from gpumond.serve.resources import compressed_json
from gpumond.serve.routes import Router, core_of, json_response

router = Router("receivers")
facts = Router("facts")

Name = Annotated[str, Path(pattern="^[a-z0-9_-]{1,64}$", description="A receiver of the configuration file")]
EXAMPLE = ReceiverTest(receiver="ops", accepted=True, status=200, reason="", detail="", duration_seconds=0.18)


@router.change(
    "POST /receivers/{name}/test", "Send a test message to a receiver", ReceiverTest, EXAMPLE, (404, 422, 429, 503, 507)
)
async def send_test(request: Request, name: Name, by: str = Depends(require_rules)) -> Response:
    """Sends one alert of the `gpumond-test` rule, with the `test="true"` label, and returns the receiver's response.

    You get 200 even if the receiver doesn't accept the message. 429: you have requested ten tests within a minute.
    """
    tokens = request.app.state.tokens
    count_at_rate(tokens, tokens.receiver_test_rate, by, "too many test messages by this caller")
    return json_response(ReceiverTest, await core_of(request).get(AlertsPart).test_receiver(name, by))


@facts.read(
    "/alerts/history",
    "Resolved alerts, most recent last",
    list[Alert],
    [as_resolved(examples.ALERT, examples.TAKEN_AT)],
    (503,),
)
async def alert_history(request: Request) -> Response:
    """Returns the last 1,000 resolved alerts, including those from before a restart."""
    return compressed_json(request, list[Alert], list(core_of(request).get(AlertsPart).past()))
