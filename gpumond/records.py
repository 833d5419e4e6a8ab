"""What outlives the daemon, as the store keeps it: values and their JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from gpumond.audit import canonical
from gpumond.history import Coarse
from gpumond.model import Alert, Expected, Held, Receipt, StepResult

T = TypeVar("T")
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


def coarse(body: Mapping[str, Any]) -> Coarse:
    own = _known(Coarse, body)
    return Coarse(**own | {name: tuple(map(tuple, own[name])) for name in ("records", "blocks")})


def alert(body: Mapping[str, Any]) -> Alert:
    own = _known(Alert, body)
    return Alert(**own | {"labels": _pairs(own["labels"]), "annotations": _pairs(own["annotations"])})


def kept_alert(body: Mapping[str, Any]) -> KeptAlert:
    own = _known(KeptAlert, body)
    return KeptAlert(**own | {"subject": _pairs(own["subject"]), "alert": alert(own["alert"])})


def receipt(body: Mapping[str, Any]) -> Receipt:
    own = _known(Receipt, body)
    for promise in ("expected", "planned"):
        own[promise] = own.get(promise) and Expected(**_known(Expected, own[promise]))
    for moment in ("before", "after"):
        own[moment] = own[moment] and Held(**_known(Held, own[moment]))
    own["steps"] = tuple(StepResult(**_known(StepResult, step)) for step in own["steps"])
    return Receipt(**own)


def _known(cls: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: a newer one may have written more."""
    return {field.name: body[field.name] for field in fields(cls) if field.name in body}


def _pairs(value: Any) -> Labels:
    return tuple((str(name), str(text)) for name, text in value)
