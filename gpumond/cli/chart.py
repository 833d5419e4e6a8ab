"""A text chart of one series, with bounded memory for a series of any length. Not a verb."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gpumond.model.units import human
from gpumond.top.bars import BLOCKS, rows_of

WIDTH = 72
LABEL = 11
COLUMNS = WIDTH - LABEL
ROWS = 4
BINS = 4 * COLUMNS
ASCII = " ...:::##"


class ChartCurve:
    """The maximum of each time interval. The interval length doubles when there are too many intervals."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._stretch = 1.0
        self._highest: list[float | None] = []

    def add(self, at: float, value: float) -> None:
        """Add a point. ``at`` must not decrease."""
        if self._start is None:
            self._start = at
        while (slot := int((at - self._start) / self._stretch)) >= BINS:
            self._halve()
        self._highest += [None] * (slot + 1 - len(self._highest))
        before = self._highest[slot]
        self._highest[slot] = value if before is None else max(before, value)

    def column(self, at: float) -> int:
        """Return the column of a time."""
        used = max(1, len(self._highest))
        slot = int((at - (self._start or 0.0)) / self._stretch)
        return min(COLUMNS - 1, max(0, slot * COLUMNS // used))

    def columns(self) -> list[float | None]:
        """Return the maximum of each column, None for a column without a point."""
        used = len(self._highest)
        if not used:
            return []
        own: list[list[float]] = [[] for _ in range(COLUMNS)]
        for slot in range(max(used, COLUMNS)):
            value = self._highest[slot * used // max(used, COLUMNS)]
            if value is not None:
                own[slot * COLUMNS // max(used, COLUMNS)].append(value)
        return [max(values, default=None) for values in own]

    def points(self) -> list[tuple[float, float]]:
        """Return the start and the maximum of each interval with a point."""
        begin = self._start or 0.0
        slots = enumerate(self._highest)
        return [(begin + slot * self._stretch, value) for slot, value in slots if value is not None]

    def _halve(self) -> None:
        pairs = zip(self._highest[::2], [*self._highest[1::2], None], strict=False)
        self._highest = [max((v for v in pair if v is not None), default=None) for pair in pairs]
        self._stretch *= 2


def draw(curve: ChartCurve, top: float | None, marks: Iterable[float] = (), blocks: str | None = None) -> list[str]:
    """Return lines of at most ``WIDTH`` characters, from 0 to ``top`` (or the maximum), with ``^`` below ``marks``."""
    blocks = blocks or (BLOCKS if can_show(BLOCKS) else ASCII)
    columns = curve.columns()
    highest = max((value for value in columns if value is not None), default=0.0)
    scale = max(top or 0.0, highest) or 1.0
    levels = [None if value is None else max(1, round(value / scale * ROWS * 8)) for value in columns]
    labels = [human(scale), *[""] * (ROWS - 2), "0"]
    lines = [
        f"{label:>{LABEL - 1}} {cells}".rstrip()
        for label, cells in zip(labels, rows_of(levels, ROWS, blocks), strict=True)
    ]
    places = {curve.column(at) for at in marks}
    if places:
        lines.append(" " * LABEL + "".join("^" if at in places else " " for at in range(max(places) + 1)))
    return lines


def can_show(text: str) -> bool:
    """Return whether standard output can encode block characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
