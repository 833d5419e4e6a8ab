"""Starts and ends of verdicts over the snapshots of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpumond.importers.builder import NAMELESS
from gpumond.model.frame import Verdict
from gpumond.model.process import ProcessKey

Key = tuple[str, ProcessKey | None, str]


class Change(NamedTuple):
    """The start (``onset``) or end of a verdict, at ``at`` (Unix seconds)."""

    at: float
    onset: bool
    verdict: Verdict


class Changes:
    """Tracker of verdicts by device, process and kind. Verdicts on pools without a pid are assigned to the device."""

    def __init__(self) -> None:
        self._held: dict[Key, Verdict] = {}

    def update(self, verdicts: Iterable[Verdict], at: float) -> Iterator[Change]:
        """Return the changes since the previous snapshot, ends first."""
        now: dict[Key, Verdict] = {}
        for verdict in verdicts:
            if verdict.pid == NAMELESS:
                summary = verdict.summary.replace(f" (pid {NAMELESS})", "")
                verdict = replace(verdict, pid=None, start_ticks=None, summary=summary)
            now.setdefault((verdict.device_uuid, verdict.process, verdict.kind), verdict)
        before, self._held = self._held, now
        for key, verdict in before.items():
            if key not in now:
                yield Change(at, False, verdict)
        for key, verdict in now.items():
            if key not in before:
                yield Change(at, True, verdict)

    @property
    def held(self) -> tuple[Verdict, ...]:
        """The active verdicts."""
        return tuple(self._held.values())
