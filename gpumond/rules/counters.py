"""Increases of counters within the window, from their counts at a few times. No I/O.

A subject's counts are kept once in ``BUCKET_SECONDS``, so that counters which change in each tick cost nothing between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

WINDOW_SECONDS = 600.0
BUCKET_SECONDS = 30.0
"""Step by which the window moves, in seconds."""

Counts = tuple[float | None, ...]
"""Counts of one subject, in a fixed order; None is unknown."""


class CounterHistory(NamedTuple):
    """The first observation of a subject, and its counts at times within the window, oldest first.

    Of consecutive marks with the same counts, only the first and the last are kept.
    """

    since: float
    marks: tuple[tuple[float, Counts], ...]

    def due(self, elapsed: float) -> bool:
        """Return True if the counts of ``elapsed`` are to be kept."""
        return elapsed - self.marks[-1][0] >= BUCKET_SECONDS

    def marked(self, counts: Counts, elapsed: float) -> CounterHistory:
        kept = [mark for mark in self.marks if mark[0] > elapsed - WINDOW_SECONDS]
        if len(kept) > 1 and kept[-1][1] == kept[-2][1] == counts:
            counts = kept.pop()[1]
        return self._replace(marks=(*kept, (elapsed, counts)))

    def increase(self, position: int, count: float | None, elapsed: float) -> float | None:
        """Return the increase of one counter to ``count``; zero is known only after a whole window.

        A counter that became smaller was reset: its new count is an increase.
        """
        known = [counts[position] for at, counts in self.marks if at > elapsed - WINDOW_SECONDS]
        values = [value for value in (*known, count) if value is not None]
        if count is None or len(values) < 2:
            return None
        grown = sum(later - earlier if later >= earlier else later for earlier, later in pairwise(values))
        return float(grown) if grown or elapsed - self.since >= WINDOW_SECONDS else None


def first(counts: Counts, elapsed: float) -> CounterHistory:
    return CounterHistory(elapsed, ((elapsed, counts),))


def combined(increases: tuple[float | None, ...]) -> float | None:
    """Return the sum of the known increases; None if none is known."""
    known = [increase for increase in increases if increase is not None]
    return sum(known) if known else None
