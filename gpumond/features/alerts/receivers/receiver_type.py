"""Base of the types of receivers, whose fields are the keys of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from gpumond.config.models import Strict
from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers import BATCH_LIMIT, Receiver


class ReceiverType(Strict):
    """Base of the types of receivers, each a `Receiver`. Its fields are the keys of its configuration.

    A subclass has a field ``type`` with its name. Addresses and secrets must not be logged; files are read at each
    send.
    """

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$", description="name in rules and metrics")

    @property
    def resend_seconds(self) -> float | None:
        return None

    @property
    def batch_limit(self) -> int:
        return BATCH_LIMIT

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int | None:
        raise NotImplementedError

    def receiver(self) -> Receiver:
        """Return the object that sends; a type with another class for this needs no pydantic in the daemon."""
        return self
