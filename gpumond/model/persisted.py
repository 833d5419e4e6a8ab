"""Values that the store keeps across restarts of the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.model.frame import Alert

Labels = tuple[tuple[str, str], ...]

Kind = Literal["raised", "resolved"]


@dataclass(frozen=True, slots=True)
class KeptAlert:
    """One alert and the labels of its subject. ``*_monotonic`` are of the daemon that kept it."""

    subject: Labels
    alert: Alert
    active_monotonic: float
    cleared_monotonic: float | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """When the daemon before was last alive: unix seconds, and by its monotonic clock."""

    at: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell one receiver. ``seq`` grows within a receiver."""

    receiver: str
    seq: int
    kind: Kind
    alert: Alert
