"""Who is told of alerts: one file per kind of receiver, each of which knows how to send and nothing else.

Queues, retries and order are the outbox's.
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
"""By type: the module whose ``notifier(receiver)`` makes one."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver as configured. Addresses and secrets are not for logs; files are read at each send."""

    name: str
    type: str
    url: str | None = None
    url_file: str | None = None
    secret_file: str | None = None
    bearer_token_file: str | None = None
    ca_file: str | None = None
    resend_seconds: float = 60.0
    instance: str = field(default_factory=socket.gethostname)
    """Whose alerts these are, where one receiver hears many machines."""


class Notifier(Protocol):
    name: str
    resend_seconds: float | None
    """How often what fires is sent again; None if once is enough."""

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> None:
        """Tell of them. Raises Retry if another try may help, Rejected if none will."""


class NotSent(GpumondError):
    """``reason`` is one word for metrics. The message never holds an address."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Retry(NotSent):
    """Another try may help, not before ``after_seconds``."""

    def __init__(self, reason: str, message: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason, message)
        self.after_seconds = after_seconds


class Rejected(NotSent):
    """The receiver will not take this, however often it is sent."""


def notifier(receiver: Receiver) -> Notifier:
    made: Any = import_module(NOTIFIERS[receiver.type]).notifier(receiver)
    sends: Notifier = made
    return sends
