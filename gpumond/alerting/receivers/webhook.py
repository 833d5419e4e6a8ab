"""Webhook: alerts as JSON; docs/how-to/notifications.md has the schema. Signed if a secret is configured."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gpumond.alerting.receivers.http_client import HttpReceiver, post, secret
from gpumond.model.frame import Alert

VERSION = 1


class Webhook(HttpReceiver):
    type: Literal["webhook"] = "webhook"
    secret_file: Path | None = Field(None, description="the key of the signature")

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        alerts = [*(entry("firing", alert) for alert in raised), *(entry("resolved", alert) for alert in resolved)]
        document = {
            "version": VERSION,
            "receiver": self.name,
            "instance": self.instance,
            "sent_at": time.time(),
            "alerts": alerts,
        }
        body = json.dumps(document, separators=(",", ":")).encode()
        headers = {}
        if self.secret_file:
            at = str(int(time.time()))
            headers = {
                "X-Gpumond-Timestamp": at,
                "X-Gpumond-Signature": f"sha256={signature(secret(self.secret_file), at, body)}",
            }
        await post(self, "", body, headers)


def signature(key: str, timestamp: str, body: bytes) -> str:
    """Return the HMAC-SHA256 of ``TIMESTAMP.BODY`` in hexadecimal: the timestamp prevents a replay."""
    return hmac.new(key.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def entry(status: str, alert: Alert) -> dict[str, Any]:
    """Return the JSON of one alert; ``fingerprint`` is the same for all its notifications."""
    identity = json.dumps(sorted(alert.labels)).encode()
    return {
        "status": status,
        "fingerprint": hashlib.sha256(identity).hexdigest()[:16],
        "rule": alert.rule,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "value": alert.value,
        "active_at": alert.active_at,
        "fired_at": alert.fired_at,
        "resolved_at": alert.resolved_at,
    }
