"""The result of a tick: the snapshot and the conclusions from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.model.snapshot import Snapshot

Share = Literal["live", "cached", "stranded", "overhead", "opaque", "unclaimed"]

SHARES: tuple[Share, ...] = ("live", "cached", "stranded", "overhead", "opaque", "unclaimed")

Phase = Literal["pending", "firing", "resolved"]


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of one share on one device; pid is None for ``unclaimed``."""

    device_uuid: str
    share: Share
    used_bytes: int
    pid: int | None = None
    workload: str = ""


@dataclass(frozen=True, slots=True)
class Overcount:
    """By how much the lines of a device exceed what its driver counts."""

    device_uuid: str
    overcount_bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds what. Per device: sum of lines = used + overcount, and every line is >= 0."""

    lines: tuple[Line, ...] = ()
    overcounts: tuple[Overcount, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a curve means, in one sentence for people. ``pid`` is None for the device as a whole.

    ``kind``: warm-up, steady, churn, periodic, step-change, leak, fragmentation, pressure, orphan, idle-holder, crash,
    release or crash-loop. ``since``: unix time of its onset. ``form`` of a leak: linear, stairs or load-proportional.
    """

    device_uuid: str
    pid: int | None
    kind: str
    since: float
    evidence: tuple[tuple[str, float], ...] = ()
    time_to_oom_seconds: float | None = None
    summary: str = ""
    form: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that is breached for one subject. ``labels`` identify it; annotations do not.

    ``active_at``: first breached; ``fired_at`` and ``resolved_at`` are None until then.
    """

    rule: str
    phase: Phase
    labels: tuple[tuple[str, str], ...]
    annotations: tuple[tuple[str, str], ...]
    value: float
    active_at: float
    fired_at: float | None = None
    resolved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """What every reader gets: one tick's facts and what follows from them."""

    snapshot: Snapshot
    ledger: Ledger
    verdicts: tuple[Verdict, ...] = ()
    alerts: tuple[Alert, ...] = ()
