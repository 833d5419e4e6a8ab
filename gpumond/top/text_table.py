"""Tables of plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpumond.top.lines import cells, fitted

LEAST = 12
"""Width that a column of text keeps on a narrow terminal."""
GAP = "  "


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
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
