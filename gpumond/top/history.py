"""History of one device or process: the bytes of its shares in the last ten minutes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from urllib.parse import urlencode

from gpumond.facts.errors import DaemonError
from gpumond.facts.units import duration, human
from gpumond.top.connection import DaemonClient
from gpumond.view.bars import BLOCKS, StackCell, block, stack
from gpumond.view.lines import Line, Span, clipped
from gpumond.view.machine import View
from gpumond.view.rows import Key

SECONDS = 600
UNKNOWN = 404
SAME_SECONDS = 0.5
"""Samples of two signals that differ by less are of one tick."""

BANDS: Mapping[str, str] = {"live": "live", "cached": "held", "overhead": "other", "unattributed": "unattributed"}
"""The color of each band and its name. ``held`` are cached and stranded bytes, ``other`` overhead and opaque ones: the
daemon's history does not distinguish them."""

Bands = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class HistoryChart:
    """History of ``SECONDS`` before ``until``. ``points``: (unix time, bands), oldest first."""

    of: Key
    until: float
    points: tuple[tuple[float, Bands], ...]


def read_history(daemon: DaemonClient, uuid: str, of: Key, until: float) -> HistoryChart:
    """Return the history of a process or a device, which the daemon knows as ``uuid``. Raises DaemonError."""
    process = of[1]
    known = {name: value for name, value in (process._asdict() if process else {}).items() if value is not None}

    def series(signal: str) -> list[tuple[float, float]]:
        query = urlencode({"uuid": uuid, **known, "signal": signal, "since": until - SECONDS})
        try:
            points = daemon.get(f"/api/v1/history?{query}")["points"]
        except DaemonError as error:
            if error.status != UNKNOWN:
                raise
            return []
        return [(float(point["at"]), float(point["high"])) for point in points]

    used, live, held = series("used"), series("live"), series("held")
    unattributed = [] if process else series("unattributed")
    points = ((at, _bands(size, _at(live, at), _at(held, at), _at(unattributed, at))) for at, size in used)
    return HistoryChart(of, until, tuple(points))


def _at(series: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a time, 0 without one: without an agent all bytes of a process are in the band ``other``."""
    place = bisect_left(series, (at - SAME_SECONDS, 0.0))
    return series[place][1] if place < len(series) and series[place][0] <= at + SAME_SECONDS else 0.0


def _bands(used: float, live: float, held: float, unattributed: float) -> Bands:
    """Divide the used bytes. The sum of the bands is ``used``."""
    sizes, rest = [], int(used)
    for size in (live, max(0.0, held - live), unattributed):
        sizes.append(min(rest, int(size)))
        rest -= sizes[-1]
    return {"live": sizes[0], "cached": sizes[1], "overhead": rest, "unattributed": sizes[2]}


def extended(past: HistoryChart, view: View) -> HistoryChart:
    """Return the history with the values of a newer view."""
    uuid, process = past.of
    found: tuple[int | None, Mapping[str, int | None]] | None
    if process is None:
        found = next(((each.used_bytes, each.shares) for each in view.devices if each.uuid == uuid), None)
    else:
        found = next(((each.used_bytes, each.shares) for each in view.processes if each.key == past.of), None)
    if found is None or found[0] is None or view.taken_at <= past.until:
        return past
    shares = {share: size or 0 for share, size in found[1].items()}
    live = shares.get("live", 0)
    held = live + shares.get("cached", 0) + shares.get("stranded", 0)
    point = (view.taken_at, _bands(found[0], live, held, shares.get("unattributed", 0)))
    kept = tuple(each for each in past.points if each[0] >= view.taken_at - SECONDS)
    return replace(past, until=view.taken_at, points=(*kept, point))


def drawn(past: HistoryChart, name: str, width: int, rows: int, monochrome: bool) -> list[Line]:
    """Return a line of text and ``rows`` lines of a chart. The chart begins at the first point."""
    if not past.points:
        return [clipped([Span(f"{name}no history yet")], width)]
    start = max(past.until - SECONDS, min(past.points[0][0], past.until - 10))
    sums = [sum(bands.values()) for _, bands in past.points]
    head = [Span(f"{name}used in the last {duration(past.until - start)}: {human(min(sums))} to {human(max(sums))}")]
    for band, size in past.points[-1][1].items():
        if size:
            mark = [] if monochrome else [Span(BLOCKS[8], ink=band)]
            head += [Span("  "), *mark, Span(f"{'' if monochrome else ' '}{BANDS[band]} {human(size)}", "dim")]
    chart = stack(past.points, start, past.until, width, rows)
    return [clipped(head, width), *(_row(row, monochrome) for row in chart)]


def _row(row: Sequence[StackCell], monochrome: bool) -> Line:
    """Return one line. Without colors it shows the height of the stack only."""
    if monochrome:
        return [Span("".join(map(block, row)))]
    return [_piece(cell, len([*same])) for cell, same in groupby(row)]


def _piece(cell: StackCell, count: int) -> Span:
    if cell.lower == cell.upper:
        return Span(BLOCKS[8 if cell.lower else 0] * count, ink=cell.lower)
    return Span(BLOCKS[cell.eighths] * count, ground=cell.upper, ink=cell.lower)
