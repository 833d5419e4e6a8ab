"""Text tables and readable sizes. Not a verb."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from gpumond.model.units import human


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A column is as wide as its widest cell; ``>`` at the start of its header aligns it right."""
    lines = [[name.lstrip(">") for name in header], *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    right = [name.startswith(">") for name in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def size(value: int | None) -> str:
    """Return a size such as ``31.2 GiB``, ``-`` if it is unknown."""
    return "-" if value is None else human(value)


def moment(at: float | None) -> str:
    """Return a unix time in local time, ``-`` if there is none."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def safe(text: str) -> str:
    """Replace control characters, escapes and marks that would change the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
