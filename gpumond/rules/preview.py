"""Would this rule have fired? The last hour's snapshots, gone through again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpumond.engine import Memory, judge
from gpumond.model import Alert, Frame, Snapshot, Verdict
from gpumond.rules import Rule

KEPT_SECONDS = 3600.0
RESOLUTION_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Preview:
    """What ``fired`` between the two times, oldest first; what fires still has no ``resolved_at``.

    One snapshot per ``resolution_seconds`` was looked at: what was shorter is not seen. Of the time before ``from_at``
    (the daemon's start, if that is less than an hour ago) nothing can be told.
    """

    from_at: float | None
    to_at: float | None
    resolution_seconds: float
    snapshots: int
    fired: tuple[Alert, ...]


class Moment(NamedTuple):
    """What is kept for it of one tick."""

    snapshot: Snapshot
    verdicts: tuple[Verdict, ...]


class LastHour:
    """The moments that are kept."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=int(KEPT_SECONDS / RESOLUTION_SECONDS))

    def see(self, frame: Frame) -> None:
        now = frame.snapshot.elapsed_seconds
        if not self._moments or now - self._moments[-1].snapshot.elapsed_seconds >= RESOLUTION_SECONDS:
            self._moments.append(Moment(frame.snapshot, frame.verdicts))

    def moments(self) -> tuple[Moment, ...]:
        return tuple(self._moments)


def preview(rule: Rule, moments: Iterable[Moment]) -> Preview:
    """``moments`` come oldest first."""
    memory, seen = Memory(), list(moments)
    firing: dict[tuple[tuple[str, str], ...], Alert] = {}
    over: list[Alert] = []
    for snapshot, verdicts in seen:
        tick = judge(memory, (rule,), snapshot, verdicts)
        memory = tick.memory
        for alert in tick.resolved:
            firing.pop(alert.labels, None)
            over.append(alert)
        firing.update((alert.labels, alert) for alert in tick.raised)
    fired = [*over, *firing.values()]
    first, last = (seen[0].snapshot.taken_at, seen[-1].snapshot.taken_at) if seen else (None, None)
    fired.sort(key=lambda alert: alert.active_at)
    return Preview(first, last, RESOLUTION_SECONDS, len(seen), tuple(fired))
