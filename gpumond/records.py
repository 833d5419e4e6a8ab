"""What outlives the daemon, as the store keeps it: values and their JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from gpumond.audit import canonical
from gpumond.history import Coarse
from gpumond.model import Alert

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


def to_text(value: Any) -> str:
    return canonical(asdict(value))


def coarse_text(series: Coarse) -> str:
    """As ``to_text``, and without a copy of each of its numbers."""
    return canonical({field.name: getattr(series, field.name) for field in fields(series)})
