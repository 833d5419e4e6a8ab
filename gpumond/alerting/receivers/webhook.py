"""Webhook: alerts as JSON; docs/how-to/notifications.md has the schema. Signed if a secret is configured."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from typing import Any

from gpumond.alerting.receivers import Receiver
from gpumond.alerting.receivers.http_client import post, secret
from gpumond.model.frame import Alert

VERSION = 1


class Webhook:
    resend_seconds: float | None = None

    def __init__(self, receiver: Receiver) -> None:
        self.name = receiver.name
        self._receiver = receiver

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        alerts = [*(entry("firing", alert) for alert in raised), *(entry("resolved", alert) for alert in resolved)]
        document = {
            "version": VERSION,
            "receiver": self.name,
            "instance": self._receiver.instance,
            "sent_at": time.time(),
            "alerts": alerts,
        }
        body = json.dumps(document, separators=(",", ":")).encode()
        headers = {}
        if self._receiver.secret_file:
            at = str(int(time.time()))
            headers = {
                "X-Gpumond-Timestamp": at,
                "X-Gpumond-Signature": f"sha256={signature(secret(self._receiver.secret_file), at, body)}",
            }
        await post(self._receiver, "", body, headers)


def notifier(receiver: Receiver) -> Webhook:
    return Webhook(receiver)


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
