"""Receivers of alerts: one file for each type, which sends notifications and nothing else.

The outbox is responsible for queues, retries and order.

To add a type, write ``receivers/NAME.py`` with a subclass of `ReceiverType`, and add it to
``features.alerts.receivers.ReceiverConfig``: its configuration, the messages about mistakes in it and
docs/reference/plugins.md derive from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from gpumond.config.models import Strict
from gpumond.facts.errors import GpumondError
from gpumond.facts.frame import Alert

BATCH_LIMIT = 64


class NotSent(GpumondError):
    """A notification was not accepted. ``reason`` is one word for metrics. The message never contains an address.

    ``status`` is the HTTP status of the answer, None without an answer.
    """

    def __init__(self, reason: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status


class Retry(NotSent):
    """Another attempt may succeed, not before ``after_seconds``."""

    def __init__(self, reason: str, message: str, after_seconds: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason, message, status)
        self.after_seconds = after_seconds


class Rejected(NotSent):
    """The receiver will not accept this notification."""


class ReceiverType(Strict):
    """Base of the types of receivers. Its fields are the keys of its configuration.

    A subclass has a field ``type`` with its name. Addresses and secrets must not be logged; files are read at each
    send.
    """

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$", description="name in rules and metrics")

    @property
    def resend_seconds(self) -> float | None:
        """Seconds after which firing alerts are sent again; None if once is enough."""
        return None

    @property
    def batch_limit(self) -> int:
        """The most alerts of one call of ``send``."""
        return BATCH_LIMIT

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int | None:
        """Send notifications. Return the HTTP status of the answer; None if the receiver has none.

        Raises Retry if another attempt may succeed, Rejected if none will.
        """
        raise NotImplementedError
