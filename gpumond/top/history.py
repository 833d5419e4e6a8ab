"""History of one device or process: the bytes of its shares in the last ten minutes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from urllib.parse import urlencode

from gpumond.facts.errors import DaemonError
from gpumond.facts.frame import SHARES
from gpumond.facts.units import duration, human
from gpumond.top.connection import DaemonClient
from gpumond.view.bars import BLOCKS, StackCell, block, stack
from gpumond.view.lines import Line, Piece, clipped
from gpumond.view.machine import View
from gpumond.view.rows import Key

SECONDS = 600
UNKNOWN = 404

Bands = Mapping[str, int]
"""Bytes of each share, from below."""


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
    query = urlencode({"uuid": uuid, **known, "since": until - SECONDS})
    try:
        found = daemon.get(f"/api/v1/history/shares?{query}")
    except DaemonError as error:
        if error.status != UNKNOWN:
            raise
        return HistoryChart(of, until, ())
    columns = [found[share] for share in SHARES]
    points = zip(found["at"], zip(*columns, strict=True), strict=True)
    return HistoryChart(of, until, tuple((float(at), _bands(values)) for at, values in points))


def _bands(values: Iterable[float | None]) -> Bands:
    """Return the bytes by share; an unknown share has none."""
    return {share: int(value or 0) for share, value in zip(SHARES, values, strict=True)}


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
    point = (view.taken_at, _bands(found[1].get(share) for share in SHARES))
    kept = tuple(each for each in past.points if each[0] >= view.taken_at - SECONDS)
    return replace(past, until=view.taken_at, points=(*kept, point))


def drawn(past: HistoryChart, name: str, width: int, rows: int, monochrome: bool) -> list[Line]:
    """Return a line of text and ``rows`` lines of a chart. The chart begins at the first point."""
    if not past.points:
        return [clipped([Piece(f"{name}no history yet")], width)]
    start = max(past.until - SECONDS, min(past.points[0][0], past.until - 10))
    sums = [sum(bands.values()) for _, bands in past.points]
    head = [Piece(f"{name}used in the last {duration(past.until - start)}: {human(min(sums))} to {human(max(sums))}")]
    for band, size in past.points[-1][1].items():
        if size:
            mark = [] if monochrome else [Piece(BLOCKS[8], ink=band)]
            head += [Piece("  "), *mark, Piece(f"{'' if monochrome else ' '}{band} {human(size)}", "dim")]
    chart = stack(past.points, start, past.until, width, rows)
    return [clipped(head, width), *(_row(row, monochrome) for row in chart)]


def _row(row: Sequence[StackCell], monochrome: bool) -> Line:
    """Return one line. Without colors it shows the height of the stack only."""
    if monochrome:
        return [Piece("".join(map(block, row)))]
    return [_piece(cell, len([*same])) for cell, same in groupby(row)]


def _piece(cell: StackCell, count: int) -> Piece:
    if cell.lower == cell.upper:
        return Piece(BLOCKS[8 if cell.lower else 0] * count, ink=cell.lower)
    return Piece(BLOCKS[cell.eighths] * count, ground=cell.upper, ink=cell.lower)
