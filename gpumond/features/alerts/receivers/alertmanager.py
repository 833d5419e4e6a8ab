"""Alertmanager's API v2: firing alerts are sent again each minute, and expire if the daemon stops sending.

The labels ``rule`` and ``machine`` are those that the shipped Prometheus rules and configuration set: Alertmanager
recognizes an alert that Prometheus sends too.

The figures are Prometheus' own: ``--rules.alert.resend-delay`` and a validity of four times that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Literal

from pydantic import Field

from gpumond.config.models import Seconds
from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers.base import HttpReceiver, post

VALID_RESEND_INTERVALS = 4
MIN_VALID_SECONDS = 60.0


class Alertmanager(HttpReceiver):
    type: Literal["alertmanager"] = "alertmanager"
    resend: Seconds = Field(
        60.0, ge=1, le=3600, description="time after which active alerts are sent again (default: `1m`)"
    )

    @property
    def resend_seconds(self) -> float:
        return self.resend

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int:
        now = time.time()
        valid_until = now + max(VALID_RESEND_INTERVALS * self.resend, MIN_VALID_SECONDS)
        alerts = [_entry(alert, self.instance, valid_until) for alert in self.with_runbook_urls(raised)]
        alerts += [_entry(alert, self.instance, alert.resolved_at or now) for alert in self.with_runbook_urls(resolved)]
        return await post(self, "/api/v2/alerts", json.dumps(alerts).encode())


def _entry(alert: Alert, instance: str, ends_at: float) -> dict[str, object]:
    starts_at = alert.fired_at or alert.active_at
    return {
        "labels": {"instance": instance, "machine": instance, "rule": alert.rule, **dict(alert.labels)},
        "annotations": dict(alert.annotations),
        "startsAt": _iso_time(starts_at),
        "endsAt": _iso_time(max(starts_at, ends_at)),  # for any clock: Alertmanager rejects an end before the start
    }


def _iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
