"""Lines of styled text: their width, and their form for a terminal. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from gpumond.view.bars import COLOURS, FREE_ON_DARK

GROUNDS: Mapping[str, str] = {**COLOURS, "free": FREE_ON_DARK, "reserved": "#6B7480"}
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
COLORED = ("warn", "bad")
"""Styles that are bold on a terminal without colors."""
CUBE = (0, 95, 135, 175, 215, 255)
"""Levels of each component in the color cube of a terminal with 256 colors."""


class Piece(NamedTuple):
    """Text with one style. ``style``: a name of ``STYLES`` or none; ``ground`` and ``ink``: the share of the background
    and of the text color.
    """

    text: str
    style: str = ""
    ground: str = ""
    ink: str = ""


Line = list[Piece]


def cells(text: str) -> int:
    """Return the number of columns that the text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


@lru_cache(maxsize=4096)
def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return the text, shortened to ``width`` columns with an ellipsis at its end."""
    if cells(text) <= width:
        return text
    kept, room = "", width - 1
    for character in text:
        room -= _cells_of(character)
        if room < 0:
            break
        kept += character
    return f"{kept}…" if width > 0 else ""


def fitted(text: str, width: int, right: bool = False) -> str:
    """Return the text in exactly ``width`` columns."""
    short = cut(text, width)
    space = " " * (width - cells(short))
    return space + short if right else short + space


def width_of(line: Iterable[Piece]) -> int:
    return sum(cells(piece.text) for piece in line)


def clipped(line: Line, width: int) -> Line:
    """Return the line, shortened to ``width`` columns."""
    if width_of(line) <= width:
        return line
    kept: Line = []
    room = max(1, width)
    for piece in line:
        own = cells(piece.text)
        if own >= room:  # the ellipsis takes one column
            kept.append(piece._replace(text=cut(piece.text + " ", room)))
            break
        kept.append(piece)
        room -= own
    return kept


def wrapped(line: Line, width: int) -> list[Line]:
    """Break a line at spaces into lines of at most ``width`` columns; a longer word is cut into pieces."""
    lines: list[Line] = [[]]
    used = 0
    for piece in line:
        for word in _words(piece.text, width):
            if used and used + cells(word.rstrip(" ")) > width:
                lines.append([])
                used = 0
                word = word.lstrip(" ")
            if word:
                lines[-1].append(piece._replace(text=word))
                used += cells(word)
    return lines


def _words(text: str, width: int) -> Iterator[str]:
    """Yield the words of a text, each with the space after it."""
    start = 0
    while start < len(text):
        end = text.find(" ", start)
        end = len(text) if end < 0 else end + 1
        yield from (text[at : min(at + width, end)] for at in range(start, end, max(1, width)))
        start = end


def ansi(line: Iterable[Piece], colors: Colors) -> str:
    """Return the line with the escape sequences of its styles."""
    return "".join(
        f"\x1b[{';'.join(codes)}m{piece.text}\x1b[0m" if (codes := [*_codes(piece, colors)]) else piece.text
        for piece in line
    )


def plain_text(line: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in line).rstrip()


def _codes(piece: Piece, colors: Colors) -> Iterator[str]:
    if colors != "none":
        if piece.ground:
            yield f"48;{_color(piece.ground, colors)}"
        if piece.ink:
            yield f"38;{_color(piece.ink, colors)}"
    if piece.style:
        yield STYLES["bold" if colors == "none" and piece.style in COLORED else piece.style]


@lru_cache(maxsize=64)
def _color(share: str, colors: Colors) -> str:
    red, green, blue = bytes.fromhex(GROUNDS[share].lstrip("#"))
    if colors == "true":
        return f"2;{red};{green};{blue}"
    places = [min(range(6), key=lambda place: abs(CUBE[place] - part)) for part in (red, green, blue)]
    return f"5;{16 + 36 * places[0] + 6 * places[1] + places[2]}"


def colors_of(environ: Mapping[str, str]) -> Colors:
    """Return the colors that the variables of the environment state."""
    if environ.get("NO_COLOR"):
        return "none"
    if environ.get("COLORTERM") in ("truecolor", "24bit"):
        return "true"
    return "256" if "256color" in environ.get("TERM", "") else "none"
