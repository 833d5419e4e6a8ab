"""Test messages to receivers."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers import NotSent, Receiver

log = logging.getLogger(__name__)

RULE = "gpumond-test"
"""The rule that a test message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTest:
    """The answer of a receiver to a test message.

    `status` is its HTTP status, null without an answer or for a receiver without HTTP. `reason` is one of the reasons
    of `gpumond_notifications_failed_total`, empty if the receiver accepted the message; `detail` states the error.
    """

    receiver: str
    accepted: bool
    status: int | None
    reason: str
    detail: str
    duration_seconds: float


async def send_test(receiver: Receiver, requested_by: str) -> ReceiverTest:
    """Send one alert that is marked as a test, as a notification is sent. The address is never in the result."""
    now, began = time.time(), time.monotonic()
    alert = Alert(
        rule=RULE,
        phase="firing",
        labels=(("alertname", RULE), ("severity", "info"), ("test", "true")),
        annotations=(("summary", f"Test message of gpumond, requested by {requested_by}. No action is required."),),
        value=1.0,
        active_at=now,
        fired_at=now,
    )
    status, reason, detail = None, "", ""
    try:
        status = await receiver.send((alert,), ())
    except NotSent as error:
        status, reason, detail = error.status, error.reason, str(error)
    except Exception as error:
        log.exception("receiver %s", receiver.name)
        reason, detail = "error", type(error).__name__
    return ReceiverTest(
        receiver=receiver.name,
        accepted=not reason,
        status=status,
        reason=reason,
        detail=detail,
        duration_seconds=time.monotonic() - began,
    )
