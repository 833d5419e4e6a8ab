"""Details of one process: its shares, its attributes and its verdicts; and the curve of the last ten minutes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlencode

from rich.text import Text
from textual.binding import Binding, BindingType

from gpumond.errors import DaemonError
from gpumond.model.units import duration, human
from gpumond.top.bars import curve
from gpumond.top.connection import DaemonClient
from gpumond.top.panel import Panel, clipped
from gpumond.top.rows import Key, ProcessLife, ProcessRow
from gpumond.top.view import View

CURVE_ROWS = 4


class Details(Panel):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "app.flush", "Flush"),
        Binding("enter", "dismiss", show=False),
    ]

    def __init__(self, key: ProcessLife) -> None:
        super().__init__()
        self.key = key

    def show(self, view: View | None, past: HistoryChart | None) -> None:
        row = next((row for row in view.processes if row.key == self.key), None) if view else None
        if row is None:
            self.set_text(Text(f"pid {self.key[1].pid} no longer uses a device"))
        else:
            self.set_text(described(row, past, max(20, self.width)))


def described(row: ProcessRow, past: HistoryChart | None, width: int) -> Text:
    text = Text().append(f"{row.program} (pid {row.pid}) on GPU {row.gpu}\n", "bold")
    if past is not None and past.of == row.key:
        text.append_text(drawn(past, "", width, CURVE_ROWS)).append("\n")
    for sentence in row.verdicts:
        text.append(f"{sentence}\n", "bold" if row.notable else "")
    shares = [("used", row.used_bytes), *row.shares.items(), ("unmapped", row.unmapped_bytes)]
    holder, kv_cache = row.kv_cache or ("", "")
    more = {holder: f", {kv_cache}"}
    terms = [(share, human(size) + more.get(share, "")) for share, size in shares if size is not None]
    terms += [("user", row.user)] if row.user else []
    for term, value in (*terms, *row.facts):
        text.append(f"{term:>11} ", "dim").append(f"{value}\n")
    if row.flush_policy is None:
        text.append(
            "this program runs without the agent; start it with gpumond run -- COMMAND to see its shares and flush it\n"
        )
    text.rstrip()
    return text


SECONDS = 600
UNKNOWN = 404


@dataclass(frozen=True, slots=True)
class HistoryChart:
    """History of ``SECONDS`` before ``until``. ``points``: (Unix time, maximum in bytes), oldest first."""

    of: Key
    until: float
    points: tuple[tuple[float, float], ...]


def read_history(daemon: DaemonClient, of: Key, until: float) -> HistoryChart:
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
    summary = f"used in the last {duration(past.until - start)}: {human(min(values))} to {human(max(values))}"
    text = clipped(Text(f"{name}{summary}"), width)
    return text.append("\n").append("\n".join(curve(past.points, start, past.until, width, rows)))
