"""Would this rule have fired? The last hour's snapshots, gone through again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumond.engine import Memory, advance
from gpumond.model import Alert, Snapshot
from gpumond.rules import Rule

KEPT_SECONDS = 3600.0
RESOLUTION_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PastAlert:
    """An alert that fired. ``resolved_at`` is None if it still does."""

    alert: Alert
    resolved_at: float | None


@dataclass(frozen=True, slots=True)
class Preview:
    """What ``fired`` between the two times, oldest first. One snapshot per ``resolution_seconds`` was looked at:
    what was shorter is not seen."""

    from_at: float | None
    to_at: float | None
    resolution_seconds: float
    snapshots: int
    fired: tuple[PastAlert, ...]


def preview(rule: Rule, snapshots: Iterable[Snapshot]) -> Preview:
    """``snapshots`` come oldest first."""
    memory, seen = Memory(), list(snapshots)
    firing: dict[tuple[tuple[str, str], ...], Alert] = {}
    over: list[PastAlert] = []
    for snapshot in seen:
        tick = advance(memory, (rule,), snapshot)
        memory = tick.memory
        for alert in tick.resolved:
            over.append(PastAlert(firing.pop(alert.labels, alert), snapshot.taken_at))
        firing.update((alert.labels, alert) for alert in tick.raised)
    fired = over + [PastAlert(alert, None) for alert in firing.values()]
    first, last = (seen[0].taken_at, seen[-1].taken_at) if seen else (None, None)
    fired.sort(key=lambda past: past.alert.active_at)
    return Preview(first, last, RESOLUTION_SECONDS, len(seen), tuple(fired))
