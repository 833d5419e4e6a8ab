"""Values that the store keeps across restarts of the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.facts.frame import Alert
from gpumond.facts.rule import Labels

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdmission:
    """One request for device memory.

    ``uid``: the user whose programs may be flushed for it; None for all users. ``pid`` and ``start_ticks``: the process
    that becomes the program, if it is known; ``program_uid``: its user. ``deadline``: the time at which the grant ends,
    of the monotonic clock; None while the request waits.
    """

    id: str
    owner: str
    device_uuid: str
    device_index: int
    need_bytes: int
    grant_seconds: float
    uid: int | None
    pid: int | None
    start_ticks: int | None
    program_uid: int | None
    deadline: float | None
