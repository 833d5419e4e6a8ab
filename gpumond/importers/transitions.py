"""When verdicts begin to hold and when they cease to, over the snapshots of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpumond.importers.builder import NAMELESS
from gpumond.model.frame import Verdict

Key = tuple[str, int | None, str]


class Change(NamedTuple):
    """At ``at`` (unix seconds) the verdict was found (``onset``), or found to hold no more."""

    at: float
    onset: bool
    verdict: Verdict


class Changes:
    """One verdict for each device, process and kind: what an allocator without a pid does is told of its device."""

    def __init__(self) -> None:
        self._held: dict[Key, Verdict] = {}

    def follow(self, verdicts: Iterable[Verdict], at: float) -> Iterator[Change]:
        """What has changed since the snapshot before. Ends come first."""
        now: dict[Key, Verdict] = {}
        for verdict in verdicts:
            if verdict.pid == NAMELESS:
                verdict = replace(verdict, pid=None, summary=verdict.summary.replace(f" (pid {NAMELESS})", ""))
            now.setdefault((verdict.device_uuid, verdict.pid, verdict.kind), verdict)
        before, self._held = self._held, now
        for key, verdict in before.items():
            if key not in now:
                yield Change(at, False, verdict)
        for key, verdict in now.items():
            if key not in before:
                yield Change(at, True, verdict)

    @property
    def held(self) -> tuple[Verdict, ...]:
        """Those that hold now."""
        return tuple(self._held.values())
