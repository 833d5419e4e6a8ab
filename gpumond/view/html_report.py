"""Reports as one HTML file: no script, no external resource, charts in SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import duration_text, size_text
from gpumond.view.text import printable

WIDTH, HEIGHT = 860.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 12.0, 10.0, 22.0
GAP_INTERVALS = 10.0
"""A distance between two points above this number of median distances is a gap in the line."""
STYLE = """
:root { color-scheme: light dark; --line: #1f6feb; --other: #d1751f; --bad: #cf222e; --soft: #8884 }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em; overflow-wrap: anywhere }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; fill: currentColor }
table { border-collapse: collapse; margin: .5em 0; display: block; overflow-x: auto }
th, td { padding: .15em .7em; text-align: left }
th { border-bottom: 1px solid } td { border-bottom: 1px solid var(--soft); overflow-wrap: break-word }
.number { text-align: right; white-space: nowrap }
.axis { stroke: currentColor; opacity: .4 } .grid { stroke: currentColor; opacity: .12 }
.curve { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-linecap: round }
.top { stroke: var(--bad); stroke-dasharray: 4 4 }
.mark { stroke: var(--bad) }
.before { fill: var(--line) } .after { fill: var(--other) }
.peak { stroke: currentColor; stroke-width: 2 }
"""
LABEL_WIDTH = 28
Point = tuple[float, float]


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return the document. ``parts`` are HTML."""
    shown = html_text(title)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{shown}</title><style>{STYLE}</style></head>\n<body><h1>{shown}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def html_text(value: str) -> str:
    """Return text of a log or program as HTML."""
    return escape(printable(value))


def paragraph(value: str) -> str:
    return f"<p>{html_text(value)}</p>"


def heading(value: str) -> str:
    return f"<h2>{html_text(value)}</h2>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the names of colors: the class of each color, and its name."""
    shapes = [
        f'<rect class="{kind}" x="{180 + 120 * number}" y="4" width="10" height="10"/>'
        f'<text x="{196 + 120 * number}" y="13">{html_text(name)}</text>'
        for number, (kind, name) in enumerate(entries)
    ]
    return _svg(18, "legend", shapes)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A column whose name begins with ``>`` has numbers."""
    numeric = [name.startswith(">") for name in header]

    def row(cells: Sequence[str], tag: str) -> str:
        columns = zip(cells, numeric, strict=True)
        shown = (f"<{tag}{' class=number' if number else ''}>{html_text(cell)}</{tag}>" for cell, number in columns)
        return f"<tr>{''.join(shown)}</tr>"

    names = [name.removeprefix(">") for name in header]
    return f"<table>{row(names, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


TICKS = 5


def _axes(begin: float, end: float, scale: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return the places of times and of values, of which ``scale`` is at the top."""
    return (
        lambda at: LEFT + (WIDTH - LEFT - RIGHT) * ((at - begin) / ((end - begin) or 1.0)),
        lambda value: TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / scale),
    )


def curve(
    points: Sequence[Point],
    top: float | None,
    marks: Iterable[tuple[float, str]],
    span: tuple[float, float] | None = None,
    gap: float | None = None,
) -> str:
    """Return a chart of bytes over seconds, from 0 to ``top`` (or the maximum), with a line at each mark.

    ``span``: the Unix times of both ends of the axis, which then has dates; else it has the seconds since the first
    point. ``gap``: distance in seconds of two points above which the line has a gap.
    """
    if not points:
        return ""
    begin, end = span or (points[0][0], points[-1][0])
    highest = max(value for _, value in points)
    scale = 1.05 * max(top or 0.0, highest) or 1.0
    x, y = _axes(begin, end, scale)
    shapes = [*_grid(scale, y)]
    if top is not None:
        shapes.append(f'<line class="top" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y(top):.1f}" y2="{y(top):.1f}"/>')
    for at, name in marks:
        position = f'x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"'
        shapes.append(f'<line class="mark" {position}><title>{html_text(name)}</title></line>')
    for part in _parts(points, gap):
        drawn = part if len(part) > 1 else part * 2  # a single point is a dot
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in drawn)
        shapes.append(f'<polyline class="curve" points="{path}"/>')
    shapes += _dates(begin, end, x) if span else _ends("0 s", duration_text(end - begin))
    return _svg(HEIGHT, f"memory over {duration_text(end - begin)}, at most {size_text(highest)}", shapes)


COLORS = ("#1f6feb", "#d1751f", "#2da44e", "#8250df", "#bf3989", "#9a6700", "#1b7c83", "#cf222e")


def areas(times: Sequence[float], curves: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Return a chart of stacked areas, the first curve at the bottom, with a legend. Unknown values count as 0."""
    if not times:
        return ""
    bottom = [0.0] * len(times)
    begin, end = times[0], times[-1]
    stacked: list[tuple[str, list[float], list[float]]] = []
    for name, values in curves:
        top = [low + (value or 0.0) for low, value in zip(bottom, values, strict=True)]
        stacked.append((name, bottom, top))
        bottom = top
    scale = 1.05 * max(bottom) or 1.0
    x, y = _axes(begin, end, scale)
    shapes = [*_grid(scale, y)]
    for number, (name, low, high) in enumerate(stacked):
        outline = [*zip(times, high, strict=True), *reversed([*zip(times, low, strict=True)])]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in outline)
        color = COLORS[number % len(COLORS)]
        shapes.append(
            f'<polygon fill="{color}" fill-opacity=".7" points="{path}"><title>{html_text(name)}</title></polygon>'
        )
        row = HEIGHT + 14 * number
        shapes.append(f'<rect x="{LEFT:g}" y="{row:g}" width="10" height="10" fill="{color}"/>')
        shapes.append(f'<text x="{LEFT + 16:g}" y="{row + 9:g}">{html_text(name)}</text>')
    seconds = duration_text(end - begin)
    shapes.append(f'<text x="{LEFT:g}" y="{HEIGHT - 5:g}">{html_text(seconds)} before</text>')
    shapes.append(f'<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 5:g}" text-anchor="end">the error</text>')
    return _svg(HEIGHT + 14 * len(stacked) + 4, f"memory by program over {seconds}", shapes)


class Bar(NamedTuple):
    """A bar of bytes with a text at its end, by default its value. ``kind``: class of its color. ``peak``: a mark."""

    kind: Literal["before", "after"]
    value: float | None
    text: str | None = None
    peak: float | None = None


def bars(name: str, rows: Sequence[tuple[str, Sequence[Bar]]], overlaid: bool = False) -> str:
    """Return a chart of bars, those of a row below each other or, ``overlaid``, one over the other."""
    scale = max((value for _, row in rows for bar in row for value in (bar.value, bar.peak) if value), default=1.0)
    left, thick, room = 180.0, 14.0, WIDTH - 180.0 - 190.0
    step = 22.0 if overlaid else 46.0
    shapes: list[str] = []
    for number, (label, row) in enumerate(rows):
        y = TOP + number * step
        shown = label if len(label) <= LABEL_WIDTH else f"{label[: LABEL_WIDTH - 1]}…"
        shapes.append(f'<text x="{left - 8:g}" y="{y + thick - 3:g}" text-anchor="end">{html_text(shown)}</text>')
        for side, bar in enumerate(row):
            bar_y = y if overlaid else y + side * (thick + 2)
            if bar.value is not None:
                size = f'width="{room * bar.value / scale:.1f}" height="{thick:g}"'
                shapes.append(f'<rect class="{bar.kind}" x="{left:g}" y="{bar_y:g}" {size}/>')
                position = f'x="{WIDTH - RIGHT:g}" y="{bar_y + thick - 3:g}" text-anchor="end"'
                shown = size_text(bar.value) if bar.text is None else html_text(bar.text)
                shapes.append(f"<text {position}>{shown}</text>")
            if bar.peak is not None:
                x = left + room * bar.peak / scale
                line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{bar_y:g}" y2="{bar_y + thick:g}"'
                shapes.append(f'<line class="peak" {line}><title>peak {html_text(size_text(bar.peak))}</title></line>')
    return _svg(TOP + len(rows) * step, name, shapes) if rows else ""


def write_report(path: Path, document: str) -> None:
    """Write the report. Raises ConfigError."""
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror or error}") from None


def check_report_path(path: Path | None) -> None:
    """Check before the work that a report can be written to ``path``. Raises ConfigError."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--html {path}: {path.parent} isn't a directory; create it, or choose another file")


def _grid(scale: float, y: Callable[[float], float]) -> Iterator[str]:
    for share in (0.0, 0.5, 1.0):
        line_y = y(share * scale / 1.05)
        kind = "grid" if share else "axis"
        yield f'<line class="{kind}" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{line_y:.1f}" y2="{line_y:.1f}"/>'
        label = size_text(share * scale / 1.05) if share else "0"
        yield f'<text x="{LEFT - 6:g}" y="{line_y + 4:.1f}" text-anchor="end">{html_text(label)}</text>'


def _ends(first: str, last: str) -> Iterator[str]:
    bottom = HEIGHT - 5
    yield f'<text x="{LEFT:g}" y="{bottom:g}">{html_text(first)}</text>'
    yield f'<text x="{WIDTH - RIGHT:g}" y="{bottom:g}" text-anchor="end">{html_text(last)}</text>'


def _dates(begin: float, end: float, x: Callable[[float], float]) -> Iterator[str]:
    """Yield times (UTC) below the axis: with hours if the axis is shorter than a few days."""
    form = "%Y-%m-%d" if end - begin > 4 * 86_400 else "%m-%d %H:%M"
    for number in range(TICKS):
        at = begin + (end - begin) * number / (TICKS - 1)
        anchor = "start" if number == 0 else "end" if number == TICKS - 1 else "middle"
        shown = datetime.fromtimestamp(at, timezone.utc).strftime(form)
        yield f'<text x="{x(at):.1f}" y="{HEIGHT - 5:g}" text-anchor="{anchor}">{shown}</text>'


def _parts(points: Sequence[Point], gap: float | None) -> Iterator[list[Point]]:
    """Yield the parts of the line between gaps."""
    distances = sorted(after[0] - before[0] for before, after in pairwise(points))
    widest = gap or (GAP_INTERVALS * distances[len(distances) // 2] if distances else 0.0)
    part = [points[0]]
    for before, after in pairwise(points):
        if after[0] - before[0] > widest:
            yield part
            part = []
        part.append(after)
    yield part


def _svg(height: float, name: str, shapes: Iterable[str]) -> str:
    box = f'viewBox="0 0 {WIDTH:g} {height:g}"'
    return f'<svg {box} role="img" aria-label="{html_text(name)}">{"".join(shapes)}</svg>'
