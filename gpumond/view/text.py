"""Plain text for a terminal or a file: tables, readable sizes, and a chart of one series."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime

from gpumond.facts.units import human
from gpumond.view.bars import BLOCKS, rows_of
from gpumond.view.lines import cells, fitted

LEAST = 12
"""Width that a column of text keeps on a narrow terminal."""
GAP = "  "


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table. ``>`` at the start of a header aligns its column right.

    A column is as wide as its widest cell. If the table is wider than ``width``, its columns of text are shortened;
    numbers are complete, so it may still be wider.
    """
    lines = [[name.lstrip(">") for name in header], *rows]
    right = [name.startswith(">") for name in header]
    widths = [max(cells(line[column]) for line in lines) for column in range(len(header))]
    if width is not None:
        widths = _narrowed(widths, _least_widths(header, widths), width - len(GAP) * (len(header) - 1))
    return [
        GAP.join(fitted(cell, own, to_right) for cell, own, to_right in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    ]


def _least_widths(header: Sequence[str], widths: Sequence[int]) -> list[int]:
    """Return the smallest width of each column: its own for numbers, that of its header or ``LEAST`` for text."""
    return [
        width if name.startswith(">") else min(width, max(LEAST, cells(name)))
        for name, width in zip(header, widths, strict=True)
    ]


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shorten the widest column that may be shorter, until all fit or none may."""
    narrowed = [*widths]
    while sum(narrowed) > room:
        places = [place for place, width in enumerate(narrowed) if width > least[place]]
        if not places:
            break
        narrowed[max(places, key=narrowed.__getitem__)] -= 1
    return narrowed


def fit(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, hideable: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return header and rows without the columns that do not fit, and the names of these.

    The columns in ``hideable`` are left out in this order, until the others fit with shortened text.
    """
    kept = [*range(len(header))]
    hidden: list[str] = []
    for name in hideable:
        if (
            width is None
            or _least_width([header[at] for at in kept], [[row[at] for at in kept] for row in rows]) <= width
        ):
            break
        if name in header:
            kept.remove(header.index(name))
            hidden.append(name.lstrip(">"))
    return [header[at] for at in kept], [[row[at] for at in kept] for row in rows], hidden


def _least_width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    lines = [[name.lstrip(">") for name in header], *rows]
    widths = [max(cells(line[column]) for line in lines) for column in range(len(header))]
    return sum(_least_widths(header, widths)) + len(GAP) * (len(header) - 1)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A column is as wide as its widest cell; ``>`` at the start of its header aligns it right."""
    return "\n".join(table_lines(header, [[safe(cell) for cell in row] for row in rows]))


def fitting_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None, hideable: Sequence[str] = ()
) -> str:
    """Return a table that fits the width, if there is one: text is shortened, and columns in ``hideable`` are left out.

    A line below the table names the columns that are left out.
    """
    cells = [[safe(cell) for cell in row] for row in rows]
    header, cells, hidden = fit(header, cells, width, hideable)
    note = [f"hidden: {', '.join(hidden)} (gpumond status -w shows all)"] if hidden else []
    return "\n".join([*table_lines(header, cells, width), *note])


def output_width() -> int | None:
    """Return the width of the terminal, None if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def broken(text: str, width: int | None) -> str:
    """Return the text with its lines broken between words, if there is a width."""
    if width is None:
        return text
    lines = (textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(own) for own in lines)


def size(value: int | None) -> str:
    """Return a size such as ``31.2 GiB``, ``-`` if it is unknown."""
    return "-" if value is None else human(value)


def moment(at: float | None) -> str:
    """Return a unix time in local time, ``-`` if there is none."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def safe(text: str) -> str:
    """Replace control characters, escapes and marks that would change the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


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
