"""Curve of the last ten minutes of a process or a device."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from rich.text import Text

from gpumond.errors import DaemonError
from gpumond.model.units import duration, human
from gpumond.top.bars import curve
from gpumond.top.daemon import DaemonClient
from gpumond.top.panel import clipped
from gpumond.top.rows import Key

SECONDS = 600
UNKNOWN = 404


@dataclass(frozen=True, slots=True)
class HistoryChart:
    """History of ``SECONDS`` before ``until``. ``points``: (Unix time, maximum in bytes), oldest first."""

    of: Key
    until: float
    points: tuple[tuple[float, float], ...]


def remember(daemon: DaemonClient, of: Key, until: float) -> HistoryChart:
    uuid, process = of
    known = {name: value for name, value in (process._asdict() if process else {}).items() if value is not None}
    query = urlencode({"uuid": uuid, **known, "signal": "used", "since": until - SECONDS})
    try:
        points = daemon.get(f"/api/v1/history?{query}")["points"]
    except DaemonError as error:
        if error.status != UNKNOWN:
            raise
        points = []
    return HistoryChart(of, until, tuple((float(point["at"]), float(point["high"])) for point in points))


def drawn(past: HistoryChart, name: str, width: int, rows: int) -> Text:
    """Return a line of text and ``rows`` lines of curve. The curve begins at the first point."""
    if not past.points:
        return clipped(Text(f"{name}no history yet"), width)
    first = past.points[0][0]
    start = max(past.until - SECONDS, min(first, past.until - 10))
    values = [value for _, value in past.points]
    said = f"used in the last {duration(past.until - start)}: {human(min(values))} to {human(max(values))}"
    text = clipped(Text(f"{name}{said}"), width)
    return text.append("\n").append("\n".join(curve(past.points, start, past.until, width, rows)))
