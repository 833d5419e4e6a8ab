"""Values that the store keeps across restarts of the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.model.frame import Alert

Labels = tuple[tuple[str, str], ...]

Kind = Literal["raised", "resolved"]


@dataclass(frozen=True, slots=True)
class KeptAlert:
    """One alert and the labels of its subject. ``*_monotonic`` are times of the clock of the daemon that stored it."""

    subject: Labels
    alert: Alert
    active_monotonic: float
    cleared_monotonic: float | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Last activity of the previous daemon: unix seconds, and seconds of its monotonic clock."""

    at: float
    monotonic: float


@dataclass(frozen=True, slots=True)
class Notice:
    """One notification for one receiver. ``seq`` increases within a receiver."""

    receiver: str
    seq: int
    kind: Kind
    alert: Alert
