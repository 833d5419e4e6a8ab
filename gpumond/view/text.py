"""Styled text for a terminal or a file: lines, tables, bars, readable sizes, and a chart of one series."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from io import TextIOWrapper
from itertools import pairwise
from typing import Literal, NamedTuple

from gpumond.facts.shares import SHARES
from gpumond.facts.units import size_text

FILLS: Mapping[str, str] = {
    "live": "#",
    "cached": "+",
    "stranded": "x",
    "overhead": "=",
    "opaque": "?",
    "unattributed": "!",
    "reserved": "-",
    "free": ".",
    "waiting": "/",
}
"""The character of each share on terminals without color."""

COLORS: Mapping[str, str] = {
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
GAP_SECONDS = 5.0
"""Longest distance of two points that isn't a gap at any interval: readings come late, and not all are requested."""


def bar(parts: Mapping[str, int], size: int, width: int) -> list[tuple[str, int]]:
    """Return (share, cells) from the left. The cells sum to ``width``; the rest of ``size`` is ``free``.

    Borders are accurate to half a cell, so a smaller share may have no cell. If the parts exceed the size (an
    overcount), they fill the bar in proportion.
    """
    sizes = {share: parts[share] for share in (*SHARES, "reserved") if parts.get(share)}
    total = max(size, sum(sizes.values()), 1)
    cells, passed, drawn = [], 0, 0
    for share, part in sizes.items():
        passed += part
        until = round(passed * width / total)
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


def stacked_chart(
    points: Sequence[tuple[float, Mapping[str, int]]], start: float, end: float, width: int, rows: int, top: int = 0
) -> list[list[StackCell]]:
    """Return the rows of a stacked chart from the top. Each point is a time and the parts from the bottom.

    A column shows the point with the largest sum in its time interval between ``start`` and ``end``, on a scale from 0
    to ``top`` or the largest sum of all. A column without a point shows the value before it, unless that is older than
    ``GAP_SECONDS`` and than twice the regular distance between points (downsampled history, a long tick interval).
    """
    highest: list[Mapping[str, int] | None] = [None] * width
    for at, parts in points:
        column = int((at - start) / max(end - start, 1e-9) * width)
        if 0 <= column <= width:
            column = min(column, width - 1)
            before = highest[column]
            if before is None or sum(parts.values()) > sum(before.values()):
                highest[column] = parts
    _fill_gaps(highest, [at for at, _ in points], (end - start) / max(width, 1))
    top = max([top, *(sum(parts.values()) for parts in highest if parts is not None)]) or 1
    columns = [_column(parts, top, rows) for parts in highest]
    return [[cells[row] for cells in columns] for row in reversed(range(rows))]


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
    overlaps = [(min(until, floor + 8) - max(begin, floor), name) for name, begin, until in spans]
    filled = [each for each in overlaps if each[0] > 0]
    height = sum(size for size, _ in filled)
    if not filled:
        return EMPTY
    largest = sorted(filled, key=lambda each: -each[0])[:2]
    if height < 8 or len(largest) == 1:
        return StackCell(largest[0][1], largest[0][1] if height == 8 else "", height)
    lower, upper = [each for each in filled if each in largest]
    return StackCell(lower[1], upper[1], round(8 * lower[0] / (lower[0] + upper[0])))


def block_character(cell: StackCell) -> str:
    """Return the character of a cell that shows the height of the stack without its parts."""
    if not cell.lower:
        return BLOCKS[0]
    return BLOCKS[8 if cell.upper else cell.eighths]


def curve_rows(levels: Sequence[int | None], rows: int, blocks: str = BLOCKS) -> Iterator[str]:
    """Yield the rows of a curve from the top. Each level is a number of eighths of a row; None is blank."""
    for row in reversed(range(rows)):
        yield "".join(" " if level is None else blocks[max(0, min(8, level - 8 * row))] for level in levels)


def _fill_gaps(columns: list[Mapping[str, int] | None], times: Sequence[float], column_seconds: float) -> None:
    """Continue each value until the next one or the end, except over a gap in the history."""
    steps = sorted(after - before for before, after in pairwise(times))
    seconds = max(GAP_SECONDS, 2 * steps[len(steps) // 2]) if steps else GAP_SECONDS
    longest = seconds / column_seconds if column_seconds else 0.0
    known = [index for index, value in enumerate(columns) if value is not None]
    for index, following in pairwise([*known, len(columns)]):
        if following - index <= longest:
            columns[index + 1 : following] = [columns[index]] * (following - index - 1)


PART_COLORS: Mapping[str, str] = {**COLORS, "free": FREE_ON_DARK, "reserved": "#6B7480", "waiting": "#4A5260"}
"""The colors of the parts of a bar on a dark background."""

Colors = Literal["none", "256", "true"]
"""Colors of a terminal. Sixteen cannot distinguish the shares, and count as none."""

STYLES: Mapping[str, str] = {
    "bold": "1",
    "dim": "2",
    "alarm": "1;7",
    "chosen": "7",
    "head": "1;7",
    "warn": "1;33",
    "bad": "1;31",
}
COLORED_STYLES = ("warn", "bad")
"""Styles that are bold on a terminal without colors."""
COLOR_CUBE_LEVELS = (0, 95, 135, 175, 215, 255)
"""Levels of each component in the color cube of a terminal with 256 colors."""


class Span(NamedTuple):
    """Text with a style of ``STYLES`` or none. ``background`` and ``foreground``: the shares whose colors it has."""

    text: str
    style: str = ""
    background: str = ""
    foreground: str = ""


StyledLine = list[Span]


def display_width(text: str) -> int:
    """Return the number of columns that the text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


@lru_cache(maxsize=4096)
def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return the text, shortened to ``width`` columns with an ellipsis at its end."""
    if display_width(text) <= width:
        return text
    kept, room = "", width - 1
    for character in text:
        room -= _character_width(character)
        if room < 0:
            break
        kept += character
    return f"{kept}…" if width > 0 else ""


def pad(text: str, width: int, right: bool = False) -> str:
    """Return the text in exactly ``width`` columns."""
    short = cut(text, width)
    space = " " * (width - display_width(short))
    return space + short if right else short + space


def width_of(line: Iterable[Span]) -> int:
    return sum(display_width(piece.text) for piece in line)


def clip_line(line: StyledLine, width: int) -> StyledLine:
    """Return the line, shortened to ``width`` columns."""
    if width_of(line) <= width:
        return line
    kept: StyledLine = []
    room = max(1, width)
    for piece in line:
        piece_width = display_width(piece.text)
        if piece_width >= room:  # the ellipsis takes one column
            kept.append(piece._replace(text=cut(piece.text + " ", room)))
            break
        kept.append(piece)
        room -= piece_width
    return kept


def wrap_line(line: StyledLine, width: int) -> list[StyledLine]:
    """Break a line at spaces into lines of at most ``width`` columns; a longer word is cut into pieces."""
    lines: list[StyledLine] = [[]]
    used = 0
    for piece in line:
        for word in _words(piece.text, width):
            if used and used + display_width(word.rstrip(" ")) > width:
                lines[-1][-1] = lines[-1][-1]._replace(text=lines[-1][-1].text.rstrip(" "))  # or the line is too long
                lines.append([])
                used = 0
                word = word.lstrip(" ")
            if word:
                lines[-1].append(piece._replace(text=word))
                used += display_width(word)
    return lines


def _words(text: str, width: int) -> Iterator[str]:
    """Yield the words of a text, each with the space after it."""
    start = 0
    while start < len(text):
        end = text.find(" ", start)
        end = len(text) if end < 0 else end + 1
        yield from (text[at : min(at + width, end)] for at in range(start, end, max(1, width)))
        start = end


def ansi(line: Iterable[Span], colors: Colors) -> str:
    """Return the line with the escape sequences of its styles."""
    return "".join(
        f"\x1b[{';'.join(codes)}m{piece.text}\x1b[0m" if (codes := [*_codes(piece, colors)]) else piece.text
        for piece in line
    )


def plain_text(line: Iterable[Span]) -> str:
    return "".join(piece.text for piece in line).rstrip()


def _codes(piece: Span, colors: Colors) -> Iterator[str]:
    if colors != "none":
        if piece.background:
            yield f"48;{_color(piece.background, colors)}"
        if piece.foreground:
            yield f"38;{_color(piece.foreground, colors)}"
    if piece.style:
        yield STYLES["bold" if colors == "none" and piece.style in COLORED_STYLES else piece.style]


@lru_cache(maxsize=64)
def _color(share: str, colors: Colors) -> str:
    red, green, blue = bytes.fromhex(PART_COLORS[share].lstrip("#"))
    if colors == "true":
        return f"2;{red};{green};{blue}"
    levels = [min(range(6), key=lambda level: abs(COLOR_CUBE_LEVELS[level] - part)) for part in (red, green, blue)]
    return f"5;{16 + 36 * levels[0] + 6 * levels[1] + levels[2]}"


def colors_of(environ: Mapping[str, str]) -> Colors:
    """Return the colors that the variables of the environment state."""
    if environ.get("NO_COLOR"):
        return "none"
    if environ.get("COLORTERM") in ("truecolor", "24bit"):
        return "true"
    return "256" if "256color" in environ.get("TERM", "") else "none"


MIN_COLUMN_WIDTH = 12
"""Width that a column of text keeps on a narrow terminal."""
COLUMN_GAP = "  "


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table. ``>`` at the start of a header aligns its column right.

    A column is as wide as its widest cell. If the table is wider than ``width``, its columns of text are shortened;
    numbers are complete, so it may still be wider.
    """
    lines = [[name.lstrip(">") for name in header], *rows]
    right = [name.startswith(">") for name in header]
    widths = [max(display_width(line[column]) for line in lines) for column in range(len(header))]
    if width is not None:
        widths = _shrink_widths(widths, _min_widths(header, widths), width - len(COLUMN_GAP) * (len(header) - 1))
    return [
        COLUMN_GAP.join(
            pad(cell, cell_width, to_right) for cell, cell_width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def _min_widths(header: Sequence[str], widths: Sequence[int]) -> list[int]:
    """Return the least width of each column: its own for numbers; ``MIN_COLUMN_WIDTH`` or its header's for text."""
    return [
        width if name.startswith(">") else min(width, max(MIN_COLUMN_WIDTH, display_width(name)))
        for name, width in zip(header, widths, strict=True)
    ]


def _shrink_widths(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shorten the widest column that may be shorter, until all fit or none may."""
    narrowed = [*widths]
    while sum(narrowed) > room:
        columns = [column for column, width in enumerate(narrowed) if width > least[column]]
        if not columns:
            break
        narrowed[max(columns, key=narrowed.__getitem__)] -= 1
    return narrowed


def fitting_columns(
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
            or _min_table_width([header[at] for at in kept], [[row[at] for at in kept] for row in rows]) <= width
        ):
            break
        if name in header:
            kept.remove(header.index(name))
            hidden.append(name.lstrip(">"))
    return [header[at] for at in kept], [[row[at] for at in kept] for row in rows], hidden


def _min_table_width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    lines = [[name.lstrip(">") for name in header], *rows]
    widths = [max(display_width(line[column]) for line in lines) for column in range(len(header))]
    return sum(_min_widths(header, widths)) + len(COLUMN_GAP) * (len(header) - 1)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    hideable: Sequence[str] = (),
    complete: str = "",
    last_width: int = 0,
) -> str:
    """Return a table. A column is as wide as its widest cell; ``>`` at the start of its header aligns it right.

    If it is wider than ``width``, by default that of the terminal, columns in ``hideable`` are left out in this order,
    and the last column is broken between words. A line below the table names the columns that are left out, and
    ``complete``, the command that shows them. ``last_width``: the width that the last column keeps.
    """
    names, cells, hidden = list(header), [list(map(printable, row)) for row in rows], list[str]()
    width = width or output_width()
    for name in filter(header.__contains__, hideable):
        missing = max(0, last_width - display_width(names[-1]))
        if width is None or display_width(table_lines(names, cells)[0]) + missing <= width:
            break
        at = names.index(name)
        cells = [row[:at] + row[at + 1 :] for row in cells]
        hidden.append(names.pop(at).lstrip(">"))
    head, *lines = table_lines(names, cells)
    if width is not None and not names[-1].startswith(">"):
        room = width - len(head) + len(names[-1])
        lines = [_wrap_last_cell(line, row[-1], width, room) for line, row in zip(lines, cells, strict=True)]
    return "\n".join([head, *lines, *_hidden_note(hidden, complete, width)])


def _hidden_note(hidden: Sequence[str], complete: str, width: int | None) -> list[str]:
    return [wrap_text(f"to see all columns: {complete} (hidden: {', '.join(hidden)})", width)] if hidden else []


MIN_LAST_WIDTH = 40
"""Width from which a column's text stays in its column; else it is below its row."""


def _wrap_last_cell(line: str, cell: str, width: int, room: int) -> str:
    """Return a row of a table whose last cell is broken into lines."""
    if display_width(line) <= width or not cell:
        return line
    begin, indent = line.removesuffix(cell.rstrip()), width - room
    if room < MIN_LAST_WIDTH:
        begin, indent, room = f"{begin.rstrip()}\n    ", 4, width - 4
    return begin + f"\n{' ' * indent}".join(textwrap.wrap(cell, room, break_long_words=False, break_on_hyphens=False))


def fitting_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None,
    hideable: Sequence[str] = (),
    complete: str = "gpumond status -w",
) -> str:
    """Return a table that fits the width, if there is one: text is shortened, and columns in ``hideable`` are left out.

    A line below the table names the columns that are left out, and ``complete``, the command that shows them.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    header, cells, hidden = fitting_columns(header, cells, width, hideable)
    return "\n".join([*table_lines(header, cells, width), *_hidden_note(hidden, complete, width)])


def output_width() -> int | None:
    """Return the width of the terminal; None if standard output isn't a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrap_text(text: str, width: int | None) -> str:
    """Return the text with its lines broken between words, if there is a width."""
    if width is None:
        return text
    lines = (textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) for line in text.split("\n"))
    return "\n".join("\n".join(wrapped) for wrapped in lines)


def size_or_dash(value: int | None) -> str:
    """Return a size such as ``31.2 GiB``, ``-`` if it is unknown."""
    return "-" if value is None else size_text(value)


def time_text(at: float | None) -> str:
    """Return a Unix time in UTC, like the times in summaries; ``-`` if there is none."""
    return "-" if at is None else datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ")


def exact_time_text(at: float) -> str:
    """Return a Unix time in UTC with the milliseconds that it has."""
    seconds, milliseconds = divmod(round(1000 * at), 1000)
    return f"{time_text(seconds)[:-1]}{f'.{milliseconds:03}'.rstrip('0.')}Z"


def printable(text: object) -> str:
    """Return untrusted text with a replacement for each character that could change the terminal or the adjacent text
    (control characters, escapes, direction marks, surrogates)."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in shown)


def printable_excerpt(text: object, max_length: int = 200) -> str:
    """Return untrusted text as `printable` does, in at most ``max_length`` characters."""
    shown = printable(str(text)[: max_length + 1])
    return shown if len(shown) <= max_length else f"{shown[: max_length - 1]}…"


CHART_WIDTH = 72
CHART_LABEL_WIDTH = 11
CHART_COLUMNS = CHART_WIDTH - CHART_LABEL_WIDTH
CHART_ROWS = 4
CHART_INTERVALS = 4 * CHART_COLUMNS
ASCII_BLOCKS = " ...:::##"


class ChartCurve:
    """The maximum of each time interval. The interval length doubles when there are too many intervals."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._interval_seconds = 1.0
        self._maxima: list[float | None] = []

    def add(self, at: float, value: float) -> None:
        """Add a point. ``at`` must not decrease."""
        if self._start is None:
            self._start = at
        while (slot := int((at - self._start) / self._interval_seconds)) >= CHART_INTERVALS:
            self._double_interval()
        self._maxima += [None] * (slot + 1 - len(self._maxima))
        before = self._maxima[slot]
        self._maxima[slot] = value if before is None else max(before, value)

    def column(self, at: float) -> int:
        """Return the column of a time."""
        used = max(1, len(self._maxima))
        slot = int((at - (self._start or 0.0)) / self._interval_seconds)
        return min(CHART_COLUMNS - 1, max(0, slot * CHART_COLUMNS // used))

    def columns(self) -> list[float | None]:
        """Return the maximum of each column, None for a column without a point."""
        used = len(self._maxima)
        if not used:
            return []
        columns: list[list[float]] = [[] for _ in range(CHART_COLUMNS)]
        for slot in range(max(used, CHART_COLUMNS)):
            value = self._maxima[slot * used // max(used, CHART_COLUMNS)]
            if value is not None:
                columns[slot * CHART_COLUMNS // max(used, CHART_COLUMNS)].append(value)
        return [max(values, default=None) for values in columns]

    def points(self) -> list[tuple[float, float]]:
        """Return the start and the maximum of each interval with a point."""
        begin = self._start or 0.0
        slots = enumerate(self._maxima)
        return [(begin + slot * self._interval_seconds, value) for slot, value in slots if value is not None]

    def _double_interval(self) -> None:
        pairs = zip(self._maxima[::2], [*self._maxima[1::2], None], strict=False)
        self._maxima = [max((v for v in pair if v is not None), default=None) for pair in pairs]
        self._interval_seconds *= 2


def draw_chart(
    curve: ChartCurve, top: float | None, marks: Iterable[float] = (), blocks: str | None = None
) -> list[str]:
    """Return lines of at most ``WIDTH`` characters, from 0 to ``top`` (or the maximum), with ``^`` below ``marks``."""
    blocks = blocks or (BLOCKS if can_show(BLOCKS) else ASCII_BLOCKS)
    columns = curve.columns()
    highest = max((value for value in columns if value is not None), default=0.0)
    scale = max(top or 0.0, highest) or 1.0
    levels = [None if value is None else max(1, round(value / scale * CHART_ROWS * 8)) for value in columns]
    labels = [size_text(scale), *[""] * (CHART_ROWS - 2), "0"]
    lines = [
        f"{label:>{CHART_LABEL_WIDTH - 1}} {cells}".rstrip()
        for label, cells in zip(labels, curve_rows(levels, CHART_ROWS, blocks), strict=True)
    ]
    marked = {curve.column(at) for at in marks}
    if marked:
        lines.append(" " * CHART_LABEL_WIDTH + "".join("^" if at in marked else " " for at in range(max(marked) + 1)))
    return lines


SIMILAR_CHARACTERS = {"…": ".", "°": " ", "↑": "^", "↓": "v", "←": "<", "→": ">"}
"""Characters for an encoding that lacks others."""


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return the characters that are written instead of those that the encoding lacks, and where it continues."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(SIMILAR_CHARACTERS.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error("similar", _replace_unencodable)


def adapt_output() -> None:
    """Let standard output accept every character. With LC_ALL=C, which Python ignores, a terminal gets ASCII."""
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        plain = sys.stdout.isatty() and os.environ.get("LC_ALL") in ("C", "POSIX")
        sys.stdout.reconfigure(encoding="ascii" if plain else None, errors="similar")


def can_show(text: str) -> bool:
    """Return whether standard output can encode block characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
