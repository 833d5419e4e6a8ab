"""Bars and curves drawn with characters, and the colours of the shares. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from gpumond.model.frame import SHARES

FILLS: Mapping[str, str] = {
    "live": "#",
    "cached": "+",
    "stranded": "x",
    "overhead": "=",
    "opaque": "?",
    "unclaimed": "!",
    "reserved": "-",
    "free": ".",
}
"""The character of each share on terminals without colour."""

COLOURS: Mapping[str, str] = {
    "live": "#1857B8",
    "cached": "#3FBAA9",
    "stranded": "#FFB71E",
    "overhead": "#9972E6",
    "opaque": "#855A6C",
    "unclaimed": "#E9660B",
    "free": "#DDE1E6",
}
"""The same on the page, in the terminal and in Grafana.

Any two differ by at least 0.12 in OKLab, both unchanged and as simulated for protanopia, deuteranopia and tritanopia
(Machado 2009). No view relies on colour alone: each share is shown with its name and bytes.
"""

FREE_ON_DARK = "#2E343D"
"""Colour of ``free`` on a dark background, where it is the background of the bar."""

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


def curve(points: Sequence[tuple[float, float]], start: float, end: float, width: int, rows: int) -> Iterator[str]:
    """Return the lines of a curve from the top. A column shows the maximum of its time interval between ``start`` and
    ``end``, on a scale from 0 to the overall maximum. A column without a point is blank, unless the regular distance
    between points is longer than a column (downsampled history, a long tick interval)."""
    highest: list[float | None] = [None] * width
    for at, value in points:
        place = int((at - start) / max(end - start, 1e-9) * width)
        if 0 <= place <= width:
            place = min(place, width - 1)
            before = highest[place]
            highest[place] = value if before is None else max(before, value)
    _bridge(highest, points, (end - start) / max(width, 1))
    top = max((value for value in highest if value is not None), default=0.0) or 1.0
    levels = [None if value is None else max(1, round(value / top * rows * 8)) if value else 0 for value in highest]
    return rows_of(levels, rows)


def rows_of(levels: Sequence[int | None], rows: int, blocks: str = BLOCKS) -> Iterator[str]:
    """Yield the rows of a curve from the top. Each level is a number of eighths of a row; None is blank."""
    for row in reversed(range(rows)):
        yield "".join(" " if level is None else blocks[max(0, min(8, level - 8 * row))] for level in levels)


def _bridge(highest: list[float | None], points: Sequence[tuple[float, float]], column_seconds: float) -> None:
    """Fill gaps that result from the regular distance between points."""
    steps = sorted(after - before for (before, _), (after, _) in pairwise(points))
    longest = 2 * steps[len(steps) // 2] / column_seconds if steps and column_seconds else 0.0
    last: int | None = None
    for place, value in enumerate(list(highest)):
        if value is None:
            continue
        if last is not None and place - last <= longest:
            highest[last + 1 : place] = [highest[last]] * (place - last - 1)
        last = place
