"""Layout of the screen: the height of each part, and the lines of the parts that have no module of their own. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gpumond.top.connection import Connection
from gpumond.top.panels import Hints
from gpumond.view.ledger import device_block, flush_estimate
from gpumond.view.lines import Line, Piece, cells, clipped, width_of
from gpumond.view.machine import View
from gpumond.view.notices import FrameNotice
from gpumond.view.remarks import STYLES
from gpumond.view.rows import plain

LEAST_TABLE = 6
DEVICES_RATIO, REMARKS_RATIO = 0.45, 0.25
"""Largest parts of the screen that devices and notices take."""
FILTER_HINT = "part of a name, pid, user, verdict, container or pod"
LARGE_ROWS, CHART_RATIO = 30, 0.15

HINTS: Hints = (
    ("?", "Help"),
    ("/", "Filter"),
    ("s", "Sort"),
    ("g", "Group"),
    ("spc", "Mark"),
    ("f", "Flush"),
    ("k", "Signal"),
    ("a", "Alerts"),
    ("q", "Quit"),
    ("d", "Details"),
    ("t", "Tree"),
    ("p", "Pause"),
    ("←→", "GPU"),
)
FILTER_HINTS: Hints = (("enter", "Done"), ("esc", "Remove the filter"))


def heights(rows: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the height of each part. The table takes the rest; on a small screen other parts are shortened for it."""
    found = dict(wanted)
    for part, least in (("remarks", 2), ("estimate", 0), ("chart", 0), ("devices", 3), ("remarks", 1)):
        excess = sum(found.values()) + LEAST_TABLE - rows
        if excess > 0:
            found[part] = max(min(least, found[part]), found[part] - excess)
    if found["chart"] < min(2, wanted["chart"]):  # the line of text alone
        found["chart"] = 0
    return found | {"table": max(1, rows - sum(found.values()))}


def chart_rows(rows: int) -> int:
    """Return the height of the chart on a screen of that many rows."""
    return 2 if rows < LARGE_ROWS else int(rows * CHART_RATIO)


def head_line(
    connections: Sequence[Connection], notices: Sequence[FrameNotice], view: View | None, paused: bool
) -> Line:
    several = len(connections) > 1
    address = ", ".join(each.name for each in connections) if several else plain(connections[0].daemon.url, 60)
    line = [Piece(f"gpumond {address}")]
    line += [piece for notice in notices for piece in (Piece("  "), Piece(notice.title.upper(), STYLES[notice.level]))]
    line += [Piece("  "), Piece("PAUSED", "alarm")] if paused else []
    if view:
        clock = time.strftime("%H:%M:%S", time.localtime(view.taken_at))
        frame = "" if several else f"  frame {view.seq}"
        line.append(Piece(f"  {view.source}{frame}  {clock}"))
    return line


def device_lines(
    view: View | None, width: int, rows: int, monochrome: bool, chosen: str | None
) -> tuple[list[Line], list[Line]]:
    """Return the lines of the devices and of their legend, each as long as ``width``."""
    if view is None:
        return [], []
    lines, legend = device_block(view, width, rows, monochrome, chosen)
    return [clipped(line, width) for line in lines], [clipped(line, width) for line in legend]


def scrolled(lines: Sequence[Line], height: int, first: int, chosen: str | None) -> int:
    """Return the first line to show, so that the selected device is visible."""
    marked = next((at for at, line in enumerate(lines) if chosen and line and line[0].style == "chosen"), first)
    first = min(max(first, marked - height + 1), marked)
    return max(0, min(first, len(lines) - height))


def pages_line(lines: Sequence[Line], first: int, height: int, count: int) -> Line:
    """Return the line that states which of the devices are shown, and how to reach the others."""
    begin, end = device_at(lines, first), device_at(lines, min(len(lines), first + height) - 1)
    return [Piece(f"devices {begin + 1} to {end + 1} of {count}; ← → and 0 to 9 select others", "dim")]


def device_at(lines: Sequence[Line], place: int) -> int:
    """Return the position of the device to which a line belongs."""
    heads = [at for at, line in enumerate(lines) if line and line[0].style in ("bold", "chosen")]
    return sum(head <= place for head in heads) - 1


def estimate_line(view: View | None) -> list[Line]:
    text = flush_estimate(view) if view else ""
    return [[Piece(text)]] if text else []


def filter_line(words: str, active: bool) -> list[Line]:
    if not active:
        return [[Piece(f"filter: {words}", "bold")]] if words else []
    return [
        [Piece("filter: ", "bold"), Piece(words), Piece(" ", "chosen"), *([] if words else [Piece(FILTER_HINT, "dim")])]
    ]


def hint_line(hints: Hints, width: int) -> Line:
    """Return the keys that fit in one line."""
    line: Line = []
    for key, effect in hints:
        pieces = [Piece(" " if line else ""), Piece(key, "bold"), Piece(f" {effect}")]
        if width_of(line) + width_of(pieces) > width:
            break
        line += pieces
    return line


def text_window(lines: Sequence[Line], height: int, first: int) -> tuple[list[Line], int]:
    """Return the lines that are shown, and the first of them, which is at most the last page."""
    first = max(0, min(first, len(lines) - height))
    return [*lines[first : first + height]], first


def padded(line: Line, width: int, style: str) -> Line:
    """Return the line in one style over the whole width."""
    rest = width - sum(cells(piece.text) for piece in line)
    return [
        *(piece if piece.style else piece._replace(style=style) for piece in line),
        Piece(" " * max(0, rest), style),
    ]
