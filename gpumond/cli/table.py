"""Text tables and readable sizes. Not a verb."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime

from gpumond.model.units import human
from gpumond.top import text_table


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A column is as wide as its widest cell; ``>`` at the start of its header aligns it right."""
    return "\n".join(text_table.table(header, [[safe(cell) for cell in row] for row in rows]))


def fitting_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None, hideable: Sequence[str] = ()
) -> str:
    """Return a table that fits the width, if there is one: text is shortened, and columns in ``hideable`` are left out.

    A line below the table names the columns that are left out.
    """
    cells = [[safe(cell) for cell in row] for row in rows]
    header, cells, hidden = text_table.fit(header, cells, width, hideable)
    note = [f"hidden: {', '.join(hidden)} (gpumond status -w shows all)"] if hidden else []
    return "\n".join([*text_table.table(header, cells, width), *note])


def output_width() -> int | None:
    """Return the width of the terminal, None if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def size(value: int | None) -> str:
    """Return a size such as ``31.2 GiB``, ``-`` if it is unknown."""
    return "-" if value is None else human(value)


def moment(at: float | None) -> str:
    """Return a unix time in local time, ``-`` if there is none."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def safe(text: str) -> str:
    """Replace control characters, escapes and marks that would change the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
