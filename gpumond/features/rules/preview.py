"""Preview of a rule: its alerts over the last hour's snapshots. No I/O."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gpumond.facts.alerts import Rule
from gpumond.facts.frame import Alert, Frame, Verdict
from gpumond.facts.messages import to_json
from gpumond.facts.snapshot import STARTING, Snapshot
from gpumond.features.rules.evaluation import RuleState, evaluate
from gpumond.quantities.window import RuleWindow, remember
from gpumond.tick.ledger import attribute

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KEPT_SECONDS = 3600.0
RESOLUTION_SECONDS = 30.0
MAX_FIRED = 1000
"""Alerts of a preview: a rule that many subjects breach every other moment would have hundreds of thousands."""
KEPT_BYTES = 16 << 20
"""Maximum size of all packed moments: 120 moments of 1000 processes each take a third of it."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the decoder of a type, made for the first preview."""
    from pydantic import TypeAdapter  # a daemon keeps moments from its start, and most never read them

    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Alerts that ``fired`` between the two times, oldest first; one that still fires has no ``resolved_at``.

    One snapshot per ``resolution_seconds`` was evaluated: a shorter breach is not found. The time before
    ``from_at`` (the daemon's start, if that is less than an hour ago, or the oldest snapshot that is kept) is
    unknown. ``fired`` has at most ``MAX_FIRED`` alerts, the newest; ``omitted`` is the number of the others.
    """

    from_at: float | None
    to_at: float | None
    resolution_seconds: float
    snapshots: int
    omitted: int
    fired: tuple[Alert, ...]


def pack(snapshot: Snapshot, verdicts: tuple[Verdict, ...]) -> bytes:
    """Pack a moment as compressed JSON: an hour of 1000 processes takes 5 MiB, as objects 200 MiB."""
    return zlib.compress(to_json(snapshot) + b"\n" + to_json(verdicts), 1)


def unpack(packed: bytes) -> tuple[Snapshot, tuple[Verdict, ...]]:
    snapshot, verdicts = zlib.decompress(packed).split(b"\n")
    return _adapter(Snapshot).validate_json(snapshot), _adapter(tuple[Verdict, ...]).validate_json(verdicts)


class PreviewWindow:
    """Packed moments of the last hour, fewer if they are large."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._moments: deque[bytes] = deque(maxlen=int(KEPT_SECONDS / RESOLUTION_SECONDS))
        self._kept_bytes, self._added_at = kept_bytes, -RESOLUTION_SECONDS

    def add(self, frame: Frame) -> None:
        """Keep a frame if it is due. Frames from before the first reading are left out, because they have no values."""
        now = frame.snapshot.elapsed_seconds
        if now - self._added_at < RESOLUTION_SECONDS or frame.snapshot.source.reason == STARTING:
            return
        self._added_at = now
        self._moments.append(pack(frame.snapshot, frame.verdicts))
        while len(self._moments) > 1 and sum(map(len, self._moments)) > self._kept_bytes:
            self._moments.popleft()

    def moments(self) -> tuple[bytes, ...]:
        return tuple(self._moments)


def preview(rule: Rule, moments: Iterable[bytes]) -> Preview:
    """Evaluate the rule on packed ``moments``, oldest first."""
    state, window, times = RuleState(), RuleWindow(), list[float]()
    firing: dict[tuple[tuple[str, str], ...], Alert] = {}
    over, count = deque[Alert](maxlen=MAX_FIRED), 0
    for moment in moments:
        snapshot, verdicts = unpack(moment)
        window = remember(window, snapshot)
        frame = Frame(snapshot, attribute(snapshot), verdicts)
        state, evaluated = evaluate(state, (rule,), frame, window)
        for alert in evaluated.resolved:
            firing.pop(alert.labels, None)
            over.append(alert)
        count += len(evaluated.resolved)
        firing.update((alert.labels, alert) for alert in evaluated.raised)
        times.append(snapshot.taken_at)
    fired = sorted([*over, *firing.values()], key=lambda alert: alert.active_at)[-MAX_FIRED:]
    omitted = count + len(firing) - len(fired)
    first, last = (times[0], times[-1]) if times else (None, None)
    return Preview(
        from_at=first,
        to_at=last,
        resolution_seconds=RESOLUTION_SECONDS,
        snapshots=len(times),
        omitted=omitted,
        fired=tuple(fired),
    )
