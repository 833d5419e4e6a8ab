"""Treemap of the sites that allocated live memory, as one HTML file without scripts or references to other files.

The layout is that of Bruls, Huizing and van Wijk, "Squarified treemaps" (2000): rectangles are placed row by row along
the shorter side of the rest, and a row ends when another rectangle would make its worst aspect ratio worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from gpumond.facts.program import Call, Site

WIDTH, HEIGHT = 1200.0, 700.0
SHOWN = 200
"""Number of sites in the treemap; the others are one rectangle."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
LETTER_WIDTH, LINE_HEIGHT = 6.6, 14.0


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def page(title: str, sites: Sequence[Site], unrecorded_bytes: int) -> str:
    """Return the HTML page. ``unrecorded_bytes``: live bytes that were allocated before the recording."""
    known = sorted((site for site in sites if site.size_bytes), key=lambda site: -site.size_bytes)
    entries = [(site.size_bytes, _name(site.calls), _details(site)) for site in known[:SHOWN]]
    for size, name in (
        (sum(site.size_bytes for site in known[SHOWN:]), "other sites"),
        (unrecorded_bytes, "allocated before the recording"),
    ):
        if size:
            entries.append((size, name, f"{name}: {readable(size)}"))
    entries.sort(key=lambda entry: -entry[0])
    total = sum(size for size, _, _ in entries)
    rectangles = layout([size for size, _, _ in entries], Rectangle(0.0, 0.0, WIDTH, HEIGHT))
    shapes = "".join(_shape(n, *entry, at) for n, (entry, at) in enumerate(zip(entries, rectangles, strict=True)))
    heading = escape(f"{title}: {readable(total)} live, by the site that allocated it")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title></head>'
        f'<body style="font:12px monospace"><h1 style="font-size:16px">{heading}</h1>'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" style="width:100%">{shapes}</svg></body></html>\n'
    )


def layout(sizes: Sequence[int], space: Rectangle) -> list[Rectangle]:
    """Return a rectangle for each of the descending positive sizes; together they fill the space."""
    placed: list[Rectangle] = []
    left, scale = sum(sizes), space.width * space.height / (sum(sizes) or 1)
    start = 0
    while start < len(sizes):
        side = min(space.width, space.height)
        end = start + 1
        worst = _worst(sizes[start:end], side, scale)
        while end < len(sizes) and (wider := _worst(sizes[start : end + 1], side, scale)) <= worst:
            worst, end = wider, end + 1
        row = sizes[start:end]
        part = sum(row) / left
        placed += _row(row, space, part)
        space = _rest(space, part)
        left -= sum(row)
        start = end
    return placed


def readable(size: int) -> str:
    value, unit = float(size), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{size} B"


def _worst(row: Sequence[int], side: float, scale: float) -> float:
    """Return the largest aspect ratio in a row along a side."""
    thickness = sum(row) * scale / side if side else 0.0
    if not thickness:
        return 1.0
    lengths = [size * scale / thickness for size in row]
    return max(max(length / thickness, thickness / length) for length in lengths)


def _row(row: Sequence[int], space: Rectangle, part: float) -> Iterator[Rectangle]:
    """Yield the rectangles of a row, which takes a part of the space along its shorter side."""
    total, before = sum(row), 0
    for size in row:
        if space.width >= space.height:
            height = space.height * size / total
            yield Rectangle(space.x, space.y + space.height * before / total, space.width * part, height)
        else:
            width = space.width * size / total
            yield Rectangle(space.x + space.width * before / total, space.y, width, space.height * part)
        before += size


def _rest(space: Rectangle, part: float) -> Rectangle:
    if space.width >= space.height:
        used = space.width * part
        return Rectangle(space.x + used, space.y, space.width - used, space.height)
    used = space.height * part
    return Rectangle(space.x, space.y + used, space.width, space.height - used)


def _shape(number: int, size: int, name: str, details: str, at: Rectangle) -> str:
    colour = COLOURS[number % len(COLOURS)]
    letters = int((at.width - 8) / LETTER_WIDTH)
    lines = [line for line in (name[-letters:], readable(size)) if 3 <= len(line) <= letters]
    lines = lines[: max(0, int((at.height - 4) / LINE_HEIGHT))]
    texts = "".join(
        f'<text x="{at.x + 4:.1f}" y="{at.y + LINE_HEIGHT * n:.1f}" fill="#fff">{escape(line)}</text>'
        for n, line in enumerate(lines, 1)
    )
    return (
        f'<g><rect x="{at.x:.1f}" y="{at.y:.1f}" width="{at.width:.1f}" height="{at.height:.1f}" fill="{colour}" '
        f'stroke="#fff"/>{texts}<title>{escape(details)}</title></g>'
    )


def _name(calls: Sequence[Call]) -> str:
    return f"{calls[0].file.rpartition('/')[2]}:{calls[0].line} {calls[0].function}" if calls else "no Python stack"


def _details(site: Site) -> str:
    stack = "\n".join(f"{call.file}:{call.line} {call.function}" for call in site.calls) or "no Python stack"
    return f"{readable(site.size_bytes)} in {site.blocks} blocks\n{stack}"
