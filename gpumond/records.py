"""What outlives the daemon, as the store keeps it: values and their JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pydantic import TypeAdapter

from gpumond.audit import canonical
from gpumond.history import Coarse
from gpumond.model import Alert, Receipt

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


def alert(body: object) -> Alert:
    """Each of these raises ValueError for what is not such a value as JSON in UTF-8; keys that this version does not
    know are left out, since a newer one may have written them."""
    return _ALERT.validate_json(body)  # type: ignore[arg-type]  # it refuses what is no text


def kept_alert(body: object) -> KeptAlert:
    return _KEPT_ALERT.validate_json(body)  # type: ignore[arg-type]


def receipt(body: object) -> Receipt:
    return _RECEIPT.validate_json(body)  # type: ignore[arg-type]


def coarse(body: object) -> Coarse:
    return _COARSE.validate_json(body)  # type: ignore[arg-type]


def notice(receiver: object, seq: object, kind: object, body: object) -> Notice:
    return Notice(*_NOTICE.validate_python((receiver, seq, kind)), alert(body))


def rule_body(body: object) -> dict[str, Any]:
    return _RULE_BODY.validate_json(body)  # type: ignore[arg-type]


_ALERT = TypeAdapter(Alert)
_KEPT_ALERT = TypeAdapter(KeptAlert)
_RECEIPT = TypeAdapter(Receipt)
_COARSE = TypeAdapter(Coarse)
_NOTICE = TypeAdapter(tuple[str, int, Kind])
_RULE_BODY = TypeAdapter(dict[str, Any])
