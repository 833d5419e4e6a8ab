"""Webhook: alerts as JSON, or as a message of a chat service; docs/how-to/notifications.md has the schema.

Signed if a secret is configured.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers import templates
from gpumond.features.alerts.receivers.http_client import HttpReceiver, linkable, post, secret

VERSION = 1


class Webhook(HttpReceiver):
    type: Literal["webhook"] = "webhook"
    secret_file: Path | None = Field(None, description="the key of the signature")
    template: templates.Template | None = Field(
        None,
        description="format of the messages: `slack`, `teams`, `discord`, or `json` (title, text, fields, link); by "
        "default the document of [the webhook](../how-to/notifications.md#the-webhook)",
    )
    page_url: str | None = Field(
        None, max_length=1024, description="address of the page, to which messages with a `template` link"
    )

    @property
    def batch_limit(self) -> int:
        return super().batch_limit if self.template is None else templates.BATCH_LIMIT

    @property
    def runbooks_address(self) -> str:
        """Return the configured address, or that of the daemon whose page is configured."""
        return self.runbooks or (f"{self.page_url.rstrip('/')}/docs/runbooks/" if self.page_url else "")

    @field_validator("page_url")
    @classmethod
    def _linkable(cls, url: str | None) -> str | None:
        if url is not None and not linkable(url):
            raise ValueError("expected an http:// or https:// address such as https://node7.example.org:9917/")
        return url

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int:
        raised, resolved = self.with_runbooks(raised), self.with_runbooks(resolved)
        document = (
            self._document(raised, resolved)
            if self.template is None
            else templates.body(self.template, raised, resolved, self.instance, self.page_url or "")
        )
        body = json.dumps(document, separators=(",", ":")).encode()
        headers = {}
        if self.secret_file:
            at = str(int(time.time()))
            headers = {
                "X-Gpumond-Timestamp": at,
                "X-Gpumond-Signature": f"sha256={signature(secret(self.secret_file), at, body)}",
            }
        return await post(self, "", body, headers)

    def _document(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "receiver": self.name,
            "instance": self.instance,
            "sent_at": time.time(),
            "alerts": [
                *(entry("firing", alert) for alert in raised),
                *(entry("resolved", alert) for alert in resolved),
            ],
        }


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
