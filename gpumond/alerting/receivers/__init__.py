"""Receivers of alerts: one file for each type, which sends notifications and nothing else.

The outbox is responsible for queues, retries and order.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from gpumond.errors import GpumondError
from gpumond.model.frame import Alert

NOTIFIERS: Mapping[str, str] = {
    "log": "gpumond.alerting.receivers.log",
    "webhook": "gpumond.alerting.receivers.webhook",
    "alertmanager": "gpumond.alerting.receivers.alertmanager",
}
"""By type: the module whose ``notifier(receiver)`` makes a notifier"""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver as configured. Addresses and secrets must not be logged; files are read at each send."""

    name: str
    type: str
    url: str | None = None
    url_file: str | None = None
    secret_file: str | None = None
    bearer_token_file: str | None = None
    ca_file: str | None = None
    resend_seconds: float = 60.0
    instance: str = field(default_factory=socket.gethostname)
    """Name of this machine, for a receiver of several machines."""


class Notifier(Protocol):
    name: str
    resend_seconds: float | None
    """Seconds after which firing alerts are sent again; None if once is enough."""

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        """Send notifications. Raises Retry if another attempt may succeed, Rejected if none will."""


class NotSent(GpumondError):
    """A notification was not accepted. ``reason`` is one word for metrics. The message never contains an address."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Retry(NotSent):
    """Another attempt may succeed, not before ``after_seconds``."""

    def __init__(self, reason: str, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason, message)
        self.after_seconds = after_seconds


class Rejected(NotSent):
    """The receiver will not accept this notification."""


def notifier(receiver: Receiver) -> Notifier:
    made: Any = import_module(NOTIFIERS[receiver.type]).notifier(receiver)
    sends: Notifier = made
    return sends
