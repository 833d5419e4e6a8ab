"""Bars and stacked charts drawn with characters, and the colors of the shares. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from gpumond.facts.frame import SHARES

FILLS: Mapping[str, str] = {
    "live": "#",
    "cached": "+",
    "stranded": "x",
    "overhead": "=",
    "opaque": "?",
    "unattributed": "!",
    "reserved": "-",
    "free": ".",
}
"""The character of each share on terminals without color."""

COLOURS: Mapping[str, str] = {
    "live": "#3351FD",
    "cached": "#2DA595",
    "stranded": "#C5870C",
    "overhead": "#A383E9",
    "opaque": "#746476",
    "unattributed": "#C13620",
    "free": "#DDE1E6",
}
"""The same in the terminal, in Grafana and in the web UI, in light and dark: each share has a contrast of 3 : 1 or more
with both grounds.

Any two differ by at least 0.12 in OKLab, both unchanged and as simulated for protanopia, deuteranopia and tritanopia
(Machado 2009). No view relies on color alone: each share is shown with its name and bytes.
"""

FREE_ON_DARK = "#2E343D"
"""Color of ``free`` on a dark background, where it is the background of the bar."""

BLOCKS = " ▁▂▃▄▅▆▇█"


def bar(parts: Mapping[str, int], size: int, width: int) -> list[tuple[str, int]]:
    """Return (share, cells) from the left. The cells sum to ``width``; the rest of ``size`` is ``free``.

    Borders are accurate to half a cell, so a smaller share may have no cell. If the parts exceed the size (an
    overcount), they fill the bar in proportion.
    """
    known = {share: parts[share] for share in (*SHARES, "reserved") if parts.get(share)}
    whole = max(size, sum(known.values()), 1)
    cells, passed, drawn = [], 0, 0
    for share, part in known.items():
        passed += part
        until = round(passed * width / whole)
        if until > drawn:
            cells.append((share, until - drawn))
        drawn = max(drawn, until)
    return [*cells, ("free", width - drawn)] if drawn < width else cells


class StackCell(NamedTuple):
    """One character of a stacked chart: the lowest ``eighths`` of it belong to ``lower``, the rest to ``upper``.

    An empty name is the space above the stack. Both are empty if nothing of the stack is in the cell.
    """

    lower: str
    upper: str
    eighths: int


EMPTY = StackCell("", "", 0)


def stack(
    points: Sequence[tuple[float, Mapping[str, int]]], start: float, end: float, width: int, rows: int
) -> list[list[StackCell]]:
    """Return the rows of a stacked chart from the top. Each point is a time and the parts from the bottom.

    A column shows the point with the largest sum in its time interval between ``start`` and ``end``, on a scale from 0
    to the largest sum of all. A column without a point is empty, unless the regular distance between points is longer
    than a column (downsampled history, a long tick interval).
    """
    highest: list[Mapping[str, int] | None] = [None] * width
    for at, parts in points:
        place = int((at - start) / max(end - start, 1e-9) * width)
        if 0 <= place <= width:
            place = min(place, width - 1)
            before = highest[place]
            if before is None or sum(parts.values()) > sum(before.values()):
                highest[place] = parts
    _bridge(highest, [at for at, _ in points], (end - start) / max(width, 1))
    top = max((sum(parts.values()) for parts in highest if parts is not None), default=0) or 1
    columns = [_column(parts, top, rows) for parts in highest]
    return [[column[row] for column in columns] for row in reversed(range(rows))]


def _column(parts: Mapping[str, int] | None, top: int, rows: int) -> list[StackCell]:
    """Return the cells of one column from the bottom."""
    if parts is None:
        return [EMPTY] * rows
    spans: list[tuple[str, int, int]] = []
    passed, drawn = 0, 0
    for name, part in parts.items():
        passed += part
        until = max(1, round(passed * rows * 8 / top)) if passed else 0
        spans.append((name, drawn, until))
        drawn = until
    return [_cell(spans, 8 * row) for row in range(rows)]


def _cell(spans: Iterable[tuple[str, int, int]], floor: int) -> StackCell:
    """Return the cell from ``floor`` on: its height, or, if it is full, the proportion of its two largest parts."""
    own = [(min(until, floor + 8) - max(begin, floor), name) for name, begin, until in spans]
    filled = [each for each in own if each[0] > 0]
    height = sum(size for size, _ in filled)
    if not filled:
        return EMPTY
    largest = sorted(filled, key=lambda each: -each[0])[:2]
    if height < 8 or len(largest) == 1:
        return StackCell(largest[0][1], largest[0][1] if height == 8 else "", height)
    lower, upper = [each for each in filled if each in largest]
    return StackCell(lower[1], upper[1], round(8 * lower[0] / (lower[0] + upper[0])))


def block(cell: StackCell) -> str:
    """Return the character of a cell that shows the height of the stack without its parts."""
    if not cell.lower:
        return BLOCKS[0]
    return BLOCKS[8 if cell.upper else cell.eighths]


def rows_of(levels: Sequence[int | None], rows: int, blocks: str = BLOCKS) -> Iterator[str]:
    """Yield the rows of a curve from the top. Each level is a number of eighths of a row; None is blank."""
    for row in reversed(range(rows)):
        yield "".join(" " if level is None else blocks[max(0, min(8, level - 8 * row))] for level in levels)


T = TypeVar("T")


def _bridge(columns: list[T | None], times: Sequence[float], column_seconds: float) -> None:
    """Fill gaps that result from the regular distance between points."""
    steps = sorted(after - before for before, after in pairwise(times))
    longest = 2 * steps[len(steps) // 2] / column_seconds if steps and column_seconds else 0.0
    last: int | None = None
    for place, value in enumerate(list(columns)):
        if value is None:
            continue
        if last is not None and place - last <= longest:
            columns[last + 1 : place] = [columns[last]] * (place - last - 1)
        last = place
