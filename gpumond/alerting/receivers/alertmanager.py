"""Alertmanager's API v2: firing alerts are sent again each minute, and expire if the daemon stops sending.

The figures are Prometheus' own: ``--rules.alert.resend-delay`` and a validity of four times that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from gpumond.alerting.receivers import Receiver
from gpumond.alerting.receivers.http_client import post
from gpumond.model.frame import Alert

VALID_RESENDS = 4
LEAST_VALID_SECONDS = 60.0


class Alertmanager:
    def __init__(self, receiver: Receiver) -> None:
        self.name = receiver.name
        self.resend_seconds: float | None = receiver.resend_seconds
        self._receiver = receiver

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        now = time.time()
        valid_until = now + max(VALID_RESENDS * self._receiver.resend_seconds, LEAST_VALID_SECONDS)
        alerts = [_entry(alert, self._receiver.instance, valid_until) for alert in raised]
        alerts += [_entry(alert, self._receiver.instance, alert.resolved_at or now) for alert in resolved]
        await post(self._receiver, "/api/v2/alerts", json.dumps(alerts).encode())


def notifier(receiver: Receiver) -> Alertmanager:
    return Alertmanager(receiver)


def _entry(alert: Alert, instance: str, ends_at: float) -> dict[str, object]:
    starts_at = alert.fired_at or alert.active_at
    return {
        "labels": {"instance": instance, **dict(alert.labels)},
        "annotations": dict(alert.annotations),
        "startsAt": _time(starts_at),
        "endsAt": _time(max(starts_at, ends_at)),  # for any clock: Alertmanager rejects an end before the start
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
