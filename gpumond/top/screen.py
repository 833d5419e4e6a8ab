"""Composition of the screen: its parts and their heights, notices, panels in front of the table, and the history."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from urllib.parse import urlencode

from gpumond.facts.errors import DaemonError
from gpumond.facts.shares import FLUSH_MEANING, SHARE_MEANINGS, SHARES
from gpumond.facts.units import clock_text, duration_text, plural, size_text
from gpumond.top.connection import DaemonClient, DaemonConnection
from gpumond.top.processes import ProcessList
from gpumond.view.frame import FrameView, view_of_device
from gpumond.view.notices import FrameNotice, group_by_kind
from gpumond.view.rows import ProcessRow, SubjectKey
from gpumond.view.tables import device_block, flush_estimate
from gpumond.view.text import (
    BLOCKS,
    Span,
    StackCell,
    StyledLine,
    block_character,
    clip_line,
    display_width,
    printable_excerpt,
    stacked_chart,
    width_of,
    wrap_line,
)

CHART_SECONDS = 600
NOT_FOUND = 404

Bands = Mapping[str, int]
"""Bytes of each share, from below."""


@dataclass(frozen=True, slots=True)
class HistoryChart:
    """History of ``CHART_SECONDS`` before ``until``. ``points``: (unix time, bands), oldest first."""

    key: SubjectKey
    until: float
    points: tuple[tuple[float, Bands], ...]


def read_history(daemon: DaemonClient, uuid: str, subject: SubjectKey, until: float) -> HistoryChart:
    """Return the history of a process or a device, which the daemon knows as ``uuid``. Raises DaemonError."""
    process = subject[1]
    key_fields = {name: value for name, value in (process._asdict() if process else {}).items() if value is not None}
    query = urlencode({"uuid": uuid, **key_fields, "since": until - CHART_SECONDS})
    try:
        found = daemon.get(f"/api/v1/history/shares?{query}")
    except DaemonError as error:
        if error.status != NOT_FOUND:
            raise
        return HistoryChart(subject, until, ())
    columns = [found[share] for share in SHARES]
    points = zip(found["at"], zip(*columns, strict=True), strict=True)
    return HistoryChart(subject, until, tuple((float(at), _bands(values)) for at, values in points))


def _bands(values: Iterable[float | None]) -> Bands:
    """Return the bytes by share; an unknown share has none."""
    return {share: int(value or 0) for share, value in zip(SHARES, values, strict=True)}


def extend_history(past: HistoryChart, view: FrameView) -> HistoryChart:
    """Return the history with the values of a newer view."""
    uuid, process = past.key
    found: tuple[int | None, Mapping[str, int | None]] | None
    if process is None:
        found = next(((each.used_bytes, each.shares) for each in view.devices if each.uuid == uuid), None)
    else:
        found = next(((each.used_bytes, each.shares) for each in view.processes if each.key == past.key), None)
    if found is None or found[0] is None or view.taken_at <= past.until:
        return past
    point = (view.taken_at, _bands(found[1].get(share) for share in SHARES))
    kept = tuple(each for each in past.points if each[0] >= view.taken_at - CHART_SECONDS)
    return replace(past, until=view.taken_at, points=(*kept, point))


def chart_lines(past: HistoryChart, name: str, width: int, rows: int, monochrome: bool) -> list[StyledLine]:
    """Return a line of text and ``rows`` lines of a chart with the largest value, and with its times if it is large.

    The chart begins at the first point.
    """
    if not past.points:
        return [clip_line([Span(f"{name}no history yet")], width)]
    start = max(past.until - CHART_SECONDS, min(past.points[0][0], past.until - 10))
    sums = [sum(bands.values()) for _, bands in past.points]
    limits = " to ".join(dict.fromkeys((size_text(min(sums)), size_text(max(sums)))))
    length = duration_text(past.until - start)
    head = [Span(f"{name}used in the last {length}: {limits}")]
    head = head if width_of(head) <= width else [Span(f"{name}last {length}")]
    for band, size in past.points[-1][1].items():
        if size:
            mark = [] if monochrome else [Span(" ", background=band)]
            part = [Span("  "), *mark, Span(f"{'' if monochrome else ' '}{band} {size_text(size)}", "dim")]
            head += part if width_of([*head, *part]) <= width else []
    times = [_times(start, past.until, width)] if rows >= TIMED_ROWS else []
    chart = stacked_chart(past.points, start, past.until, max(1, width - LABEL_WIDTH), rows - len(times))
    labels = [size_text(max(sums)), *[""] * (len(chart) - 2), "0"]
    scaled = (
        [Span(f"{label:>{LABEL_WIDTH - 1}} ", "dim"), *_chart_row(row, monochrome)]
        for label, row in zip(labels, chart, strict=False)
    )
    return [clip_line(head, width), *scaled, *times]


LABEL_WIDTH = 11
"""Columns of the value beside the chart."""
TIMED_ROWS = 4
"""Rows from which on the last one has the times."""


def _times(start: float, until: float, width: int) -> StyledLine:
    begin, end = clock_text(start), clock_text(until)
    gap = " " * max(1, width - LABEL_WIDTH - display_width(begin + end))
    return clip_line([Span(f"{'':{LABEL_WIDTH}}{begin}{gap}{end}", "dim")], width)


def _chart_row(row: Sequence[StackCell], monochrome: bool) -> StyledLine:
    """Return one line. Without colors it shows the height of the stack only."""
    if monochrome:
        return [Span("".join(map(block_character, row)))]
    return [_chart_span(cell, len([*same])) for cell, same in groupby(row)]


def _chart_span(cell: StackCell, count: int) -> Span:
    if cell.lower == cell.upper:
        return Span(BLOCKS[8 if cell.lower else 0] * count, foreground=cell.lower)
    return Span(BLOCKS[cell.eighths] * count, background=cell.upper, foreground=cell.lower)


def read_utilization(daemon: DaemonClient, uuid: str, until: float) -> list[tuple[float, float]]:
    """Return the utilization of a device in the last ``CHART_SECONDS``: unix times and ratios. Raises DaemonError."""
    query = urlencode({"uuid": uuid, "signal": "utilization", "since": until - CHART_SECONDS})
    return [(float(each["at"]), float(each["median"])) for each in daemon.get(f"/api/v1/history?{query}")["points"]]


class SensorHistory:
    """Utilization and power of each device in the last ``CHART_SECONDS``. The daemon keeps no power before the
    first view.

    ``unread``: devices that are shown and whose earlier utilization has not been requested.
    """

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, float | None, float | None]]] = {}
        self._shown: set[str] = set()
        self.unread: list[str] = []

    def add(self, view: FrameView) -> None:
        self._points = {device.uuid: self._points.get(device.uuid, deque()) for device in view.devices}
        for device in view.devices:
            points = self._points[device.uuid]
            if not points or points[-1][0] != view.taken_at:
                points.append((view.taken_at, device.busy_ratio, device.watts))
            while points[0][0] < view.taken_at - CHART_SECONDS:
                points.popleft()

    def prepend(self, uuid: str, busy: Iterable[tuple[float, float]]) -> None:
        """Add the earlier utilization of a device, as pairs of a unix time and a ratio, the oldest first."""
        if points := self._points.get(uuid):
            begin = points[0][0]
            points.extendleft(reversed([(at, ratio, None) for at, ratio in busy if at < begin]))

    def lines(self, uuid: str, width: int) -> list[StyledLine]:
        """Return a line with a curve of each value that is known, over the same time; none before the second value."""
        if uuid not in self._shown:
            self._shown.add(uuid)
            self.unread.append(uuid)
        points = self._points.get(uuid) or deque()
        busy = [(at, {"busy": round(100 * ratio)}) for at, ratio, _ in points if ratio is not None]
        watts = [(at, {"power": round(power)}) for at, _, power in points if power is not None]
        curves = [
            (f"{name} up to {max(part[name] for _, part in values)}{unit} ", values, highest)
            for name, values, unit, highest in (("busy", busy, "%", 100), ("power", watts, " W", 0))
            if len(values) > 1
        ]
        if not curves:
            return []
        start, until = min(values[0][0] for _, values, _ in curves), points[-1][0]
        line = [Span(f"last {duration_text(round(until - start, -1) or until - start)}: ", "dim")]
        curve_width = (width - width_of(line)) // len(curves)
        for title, values, highest in curves:
            curve = "".join(
                map(
                    block_character,
                    stacked_chart(values, start, until, max(1, curve_width - display_width(title) - 2), 1, highest)[0],
                )
            )
            line += [Span(title, "dim"), Span(f"{curve}  ")]
        return [line]


Hints = Sequence[tuple[str, str]]
"""Keys and their effects."""


class Panel:
    """Text that scrolls. ``lines`` returns it for a width. ``first_line``: the first line that is shown.

    ``hints`` returns the keys to show, if they are not those that close and scroll. ``entry`` is None, or the text that
    the user edits.
    """

    def __init__(
        self,
        lines: Callable[[int], list[StyledLine]],
        closing: Sequence[str] = (),
        keys: Mapping[str, Callable[[], None]] = {},
        hints: Callable[[], Hints] = tuple,
    ) -> None:
        self.lines, self.closing, self.keys = lines, ("escape", "q", *closing), keys
        self._hints = hints
        self.first_line = 0
        self.entry: str | None = None
        self.revealed: tuple[int, int] | None = None
        """The lines, first and last, that the next drawing scrolls to if they aren't visible."""

    @property
    def hints(self) -> Hints:
        return self._hints() or (("esc", "Close"), ("↑↓", "Scroll"))

    def scroll(self, lines: int) -> None:
        """Move the text. The screen limits ``first_line`` to the lines that exist."""
        self.first_line = max(0, self.first_line + lines)


HELP = """
Rows
j k, ↑ ↓ | next and previous row (also PgUp, PgDn, Home and End)
Enter, d | open or close details of a process, or a group
w | show what a program's memory consists of and, if known, the lines that retain it
x, Space | mark or unmark a process or a group
U | unmark all
/, F3, F4 | filter by words: all must match; user:root in one field, -word without it
Esc | clear the filter, the GPU selection and all marks
Order
s, >  and  < | sort by the next and previous column
r, I | reverse the order
g | group by the next property: user, workload, container, or none
t, F5 | show processes as a tree (this machine only)
c | choose the columns; gpumond top saves your choice
GPUs
← →, 0 to 9 | select a GPU
 | the chart shows the selected GPU, or else the process under the cursor
Actions (each asks for confirmation)
f | flush the marked processes, or else the one under the cursor
F | flush the selected GPU, or else all programs with an agent
z, Z | suspend or resume the program under the cursor; suspending moves its GPU memory to the host
S | choose an alert with ↑ ↓ (this program's come first), type a reason, and silence it for an hour
K, F9 | send a signal to your own programs: the marked ones, or else the one under the cursor
Other
a | show alerts, verdicts and problems in full
e | show events, and what would have prevented out-of-memory errors; → shows the minute before an event
p | pause
mouse | click a column to sort, a GPU or a row to select it; scroll with the wheel
?, h, F1 | show this help
q, F10, Ctrl-C | quit
"""
"""Titles, and keys with their effects."""
HELP_SHARES = (
    "\n".join(f"{share} | {SHARE_MEANINGS[share]}" for share in (*SHARES, "unmapped"))
    + "\nwaste | Cached and stranded memory."
)
KEY_WIDTH = 15
"""Columns of the keys."""


def help_lines(width: int) -> list[StyledLine]:
    lines: list[StyledLine] = []
    for entry in f"{HELP.strip()}\nShares\n{HELP_SHARES}\nFlush\n | {FLUSH_MEANING}".splitlines():
        key, is_key, effect = entry.partition(" | ")
        if not is_key:
            lines += [*([[]] if lines else []), [Span(key, "bold")]]
            continue
        line, *rest = wrap_line([Span(effect)], max(KEY_WIDTH, width - KEY_WIDTH - 2))
        lines.append([Span(f"  {key:<{KEY_WIDTH}}", "bold"), *line])
        lines += [[Span(" " * (KEY_WIDTH + 2)), *line] for line in rest]
    return lines


WITHOUT_AGENT = (
    "this program runs without the agent; start it with gpumond run -- COMMAND to see its shares and to flush it"
)
TERM_WIDTH = 11


def detail_lines(row: ProcessRow, history: Sequence[StyledLine], width: int) -> list[StyledLine]:
    """Return the lines of the details. ``history``: the lines of its chart, if any."""
    lines: list[StyledLine] = [[Span(f"{row.program} (pid {row.pid}) on GPU {row.gpu}", "bold")], *history]
    for sentence in row.verdicts:
        lines += wrap_line([Span(sentence, row.level)], width)
    shares = [("used", row.used_bytes), *row.shares.items(), ("unmapped", row.unmapped_bytes)]
    holder, kv_cache = row.kv_cache or ("", "")
    suffixes = {holder: f" ({kv_cache})"} if kv_cache else {}
    if row.overhead_parts:
        suffixes["overhead"] = f"{suffixes.get('overhead', '')}: {row.overhead_parts}"
    terms = [(share, size_text(size) + suffixes.get(share, "")) for share, size in shares if size is not None]
    terms += [("user", row.user)] if row.user else []
    if row.host:
        cpu = "" if row.host.cpu_ratio is None else f", {row.host.cpu_ratio:.0%} of a core"
        terms.append(("runs", f"{row.host.command} (for {duration_text(row.host.age_seconds)}{cpu})"))
        terms.append(("host memory", size_text(row.host.resident_bytes)))
    for term, value in (*terms, *row.details):
        lines += wrap_line([Span(f"{term:>{TERM_WIDTH}} ", "dim"), Span(value)], width)
    if row.flush_policy is None:
        lines += wrap_line([Span(WITHOUT_AGENT)], width)
    return lines


MIN_TABLE, TABLE_RATIO = 6, 0.4
"""Lines that the table has at least, and the part of the screen up to which its rows precede chart and notices."""
DEVICES_RATIO, NOTICES_RATIO = 0.45, 0.17
"""Parts of the screen that devices take at most, and notices always: rows that come and go would move the others."""
FILTER_HINT = "words that all match; user:root in one field, -word without it"
LARGE_ROWS, CHART_RATIO, FREE_CHART_RATIO = 30, 0.15, 0.5
"""On a large screen, the part that the chart takes from the table, and the largest part that it takes otherwise."""

HINTS: Hints = (
    ("?", "Help"),
    ("q", "Quit"),
    ("/", "Filter"),
    ("s", "Sort"),
    ("g", "Group"),
    ("f", "Flush"),
    ("z", "Suspend"),
    ("a", "Alerts"),
    ("e", "Events"),
    ("w", "Why"),
    ("x", "Mark"),
    ("S", "Silence"),
    ("d", "Details"),
    ("p", "Pause"),
    ("←→", "GPU"),
    ("t", "Tree"),
    ("c", "Columns"),
    ("K", "Signal"),
)
FILTER_HINTS: Hints = (("enter", "Done"), ("esc", "Remove the filter"))


class Screen:
    """Composes devices, table, chart and notices, and remembers where they are, for the mouse.

    ``parts``: first row and height of each part that reacts to the mouse.
    """

    def __init__(self, monochrome: bool, curves: bool = True) -> None:
        self.monochrome, self.curves = monochrome, curves
        self.sensors = SensorHistory()
        self.parts: dict[str, tuple[int, int]] = {}
        self._first_line = 0
        self._device_lines: Sequence[StyledLine] = ()

    def lines(
        self,
        view: FrameView | None,
        notices: Sequence[FrameNotice],
        table: ProcessList,
        device: str | None,
        filtering: bool,
        chart_lines: Callable[[int, int], list[StyledLine]],
        width: int,
        height: int,
        silent: bool = False,
    ) -> list[StyledLine]:
        """Return the lines below the head. ``chart_lines`` returns the chart for a width and a number of rows.

        ``silent``: the daemon doesn't answer, so all lines but those about that are dimmed.
        """
        curves = self.curves and height + 2 >= LARGE_ROWS
        devices, legend = clipped_device_lines(
            view,
            width,
            height + 2,
            self.monochrome,
            device,
            lambda uuid: self.sensors.lines(uuid, width) if curves else (),
        )
        concerned = view and view_of_device(view, device)
        estimate = estimate_line(concerned, width)
        entry = filter_line(table.filter_text, filtering)
        about = [*all_notices(None if silent else concerned, notices)]
        wanted = {
            "devices": min(len(devices) + len(legend), int((height + 2) * DEVICES_RATIO)),
            "estimate": len(estimate),
            "filter": len(entry),
            "notices": notice_rows(height + 2),
        }
        free = height - sum(wanted.values()) - len(table.rows) - 3  # the heads of table and chart, and a gap
        chart = chart_lines(width, chart_rows(height + 2, free))
        room = heights(height, {**wanted, "chart": len(chart)}, len(table.rows) + 1)
        chart = chart if room["chart"] in (0, len(chart)) else chart_lines(width, room["chart"] - 1)
        device_rows = max(1, room["devices"] - len(legend))
        if len(devices) > device_rows > 1 and view:
            device_rows -= 1
            self._first_line = first_line_shown(devices, device_rows, self._first_line, device)
            legend = [pages_line(devices, self._first_line, device_rows, len(view.devices)), *legend]
        self._first_line = first_line_shown(devices, device_rows, self._first_line, device)
        self._device_lines = devices
        shown_devices = [*devices[self._first_line : self._first_line + device_rows], *legend][: room["devices"]]
        above = [*shown_devices, *estimate[: room["estimate"]]]
        rows = table.lines(width, room["table"])
        self.parts = {"devices": (1, len(shown_devices)), "table": (1 + len(above), room["table"])}
        blank: list[StyledLine] = [[]] * (room["table"] - len(rows))
        lowest = notice_lines(about, width, room["notices"])
        none: list[StyledLine] = [[]] * (room["notices"] - len(lowest))
        facts = [*above, *rows, *blank, *entry, *(chart if room["chart"] else ())]
        facts = [*map(dim_line, facts)] if silent else facts
        return [clip_line(line, width) for line in (*facts, *lowest, *none)]

    @property
    def page(self) -> int:
        """The rows of one page of the table."""
        return max(1, self.parts.get("table", (0, 2))[1] - 1)

    def device_of(self, row: int) -> int | None:
        """Return the position of the device in a line of the part ``devices``; None below the last one."""
        line = self._first_line + row
        return device_at(self._device_lines, line) if line < len(self._device_lines) else None


def dim_line(line: StyledLine) -> StyledLine:
    """Return the line without emphasis, except that of what is selected."""
    return [piece._replace(style=piece.style if piece.style == "chosen" else "dim") for piece in line]


def whole_screen(
    head: StyledLine, body: Sequence[StyledLine], message: str, hints: Hints, width: int, height: int
) -> list[StyledLine]:
    """Return the whole screen: head, body, and the message or else the keys."""
    bottom = [Span(message, "bold")] if message else hint_line(hints, width)
    return [pad_line(clip_line(head, width), width, "head"), *body[: height - 2], clip_line(bottom, width)][:height]


def panel_lines(panel: Panel, width: int, height: int) -> list[StyledLine]:
    content = panel.lines(width - 2)
    if panel.revealed:
        begin, end = panel.revealed
        panel.first_line, panel.revealed = min(max(panel.first_line, end - height + 1), begin), None
    lines, panel.first_line = text_window(content, height, panel.first_line)
    blank: list[StyledLine] = [[]] * (height - len(lines))
    return [*([Span(" "), *clip_line(line, width - 2)] for line in lines), *blank]


def heights(rows: int, wanted: Mapping[str, int], table: int = 0) -> dict[str, int]:
    """Return the height of each part. The table takes the rest; on a small screen other parts are shortened for it.

    ``table``: the lines of the complete table.
    """
    found = dict(wanted)
    needed = max(MIN_TABLE, min(table, int(rows * TABLE_RATIO)))
    for part, least in (("notices", 3), ("chart", 0), ("devices", 3), ("notices", 1), ("estimate", 0)):
        excess = sum(found.values()) + needed - rows
        if excess > 0:
            found[part] = max(min(least, found[part]), found[part] - excess)
    if found["chart"] < min(2, wanted["chart"]):  # the line of text alone
        found["chart"] = 0
    return found | {"table": max(1, rows - sum(found.values()))}


def chart_rows(rows: int, free: int) -> int:
    """Return the height of the chart on a screen of that many rows, of which ``free`` are not needed otherwise."""
    return 2 if rows < LARGE_ROWS else max(int(rows * CHART_RATIO), min(free, int(rows * FREE_CHART_RATIO)))


def notice_rows(rows: int) -> int:
    """Return the lines of the notices on a screen of that many rows."""
    return max(2, int(rows * NOTICES_RATIO))


MIN_ADDRESS = 20
"""Columns below which an address isn't shown."""


def head_line(
    connections: Sequence[DaemonConnection],
    notices: Sequence[FrameNotice],
    view: FrameView | None,
    paused: bool,
    width: int,
) -> StyledLine:
    """Return the line with address, problems and time. On a narrow screen the address is shorter or absent."""
    url, several = printable_excerpt(connections[0].daemon.reached, 60), len(connections) > 1
    address = ", ".join(each.name for each in connections) if several else url
    line = [piece for each in notices for piece in (Span("  "), Span(each.title.upper(), STYLE_BY_LEVEL[each.level]))]
    line += [Span("  "), Span("PAUSED", "alarm")] if paused else []
    at = [Span(f"  {clock_text(view.taken_at)}")] if view else []
    source = [Span(f"  {view.source}")] if view else []
    begin = Span("gpumond")
    room = max(MIN_ADDRESS, width - width_of([begin, *line, *at]) - 1)
    short = Span(f" {printable_excerpt(address.removeprefix('http://'), room)}")
    versions = ([begin, Span(f" {address}"), *line, *source, *at], [begin, short, *line, *at], [begin, *line, *at])
    return next((each for each in versions if width_of(each) <= width), [begin, *line])


def clipped_device_lines(
    view: FrameView | None,
    width: int,
    rows: int,
    monochrome: bool,
    selected: str | None,
    past: Callable[[str], Iterable[StyledLine]],
) -> tuple[list[StyledLine], list[StyledLine]]:
    """Return the lines of the devices and of their legend, each as long as ``width``."""
    if view is None:
        return [], []
    lines, legend = device_block(view, width, rows, monochrome, selected, past)
    return [clip_line(line, width) for line in lines], [clip_line(line, width) for line in legend]


def first_line_shown(lines: Sequence[StyledLine], height: int, first_line: int, selected: str | None) -> int:
    """Return the first line to show, so that the selected device is visible."""
    marked = next((at for at, line in enumerate(lines) if selected and line and line[0].style == "chosen"), first_line)
    first_line = min(max(first_line, marked - height + 1), marked)
    return max(0, min(first_line, len(lines) - height))


def pages_line(lines: Sequence[StyledLine], first_line: int, height: int, count: int) -> StyledLine:
    """Return the line that states which of the devices are shown, and how to reach the others."""
    begin, end = device_at(lines, first_line), device_at(lines, min(len(lines), first_line + height) - 1)
    return [Span(f"GPUs {begin + 1} to {end + 1} of {count}; ← → and 0 to 9 select others", "dim")]


def device_at(lines: Sequence[StyledLine], index: int) -> int:
    """Return the position of the device to which a line belongs."""
    heads = [at for at, line in enumerate(lines) if line and line[0].style in ("bold", "chosen")]
    return sum(head <= index for head in heads) - 1


def estimate_line(view: FrameView | None, width: int) -> list[StyledLine]:
    """Return the line about what a flush would release. The amount is kept on a narrow screen."""
    if view is None:
        return []
    text = flush_estimate(view)
    clause = text.partition(";")[0]
    versions = (text, clause, re.sub(" of .* would", " would", clause))
    return [[Span(next((each for each in versions if display_width(each) <= width), versions[-1]))]]


def filter_line(words: str, active: bool) -> list[StyledLine]:
    if not active:
        return [[Span(f"filter: {words}", "bold"), Span("  Esc removes it", "dim")]] if words else []
    return [entry_line("filter", words, FILTER_HINT)]


def entry_line(name: str, entry: str, hint: str) -> StyledLine:
    """Return the line in which a text is edited. ``hint`` stands in it while it is empty."""
    return [Span(f"{name}: ", "bold"), Span(entry), Span(" ", "chosen"), *([] if entry else [Span(hint, "dim")])]


def edit_text(entry: str, key: str) -> str:
    """Return a text after a key: a character, or one that removes the last character or all."""
    if key == "backspace":
        return entry[:-1]
    if key == "ctrl-u":
        return ""
    return entry + key if len(key) == 1 and key.isprintable() else entry


def hint_line(hints: Hints, width: int) -> StyledLine:
    """Return the keys that fit in one line."""
    line: StyledLine = []
    for key, effect in hints:
        pieces = [Span(" " if line else ""), Span(key, "bold"), Span(f" {effect}")]
        if width_of(line) + width_of(pieces) > width:
            break
        line += pieces
    return line


def text_window(lines: Sequence[StyledLine], height: int, first_line: int) -> tuple[list[StyledLine], int]:
    """Return the lines that are shown, and the first of them, which is at most the last page."""
    first_line = max(0, min(first_line, len(lines) - height))
    return [*lines[first_line : first_line + height]], first_line


def pad_line(line: StyledLine, width: int, style: str) -> StyledLine:
    """Return the line in one style over the whole width."""
    rest = width - sum(display_width(piece.text) for piece in line)
    return [
        *(piece if piece.style else piece._replace(style=style) for piece in line),
        Span(" " * max(0, rest), style),
    ]


STYLE_BY_LEVEL = {"bad": "bad", "warn": "warn", "note": ""}


def all_notices(view: FrameView | None, connections: Iterable[FrameNotice]) -> Iterator[FrameNotice]:
    """Yield all notices, those about the connections first."""
    yield from connections
    if view is None:
        return
    yield from view.notices
    yield from (replace(alert, title=f"alert {alert.title}") for alert in view.alerts)
    yield from view.verdicts
    yield from view.stuck
    if view.processes and not view.agents:
        yield FrameNotice(
            "note", "no program runs the agent", "start one with gpumond run -- YOUR_PYTHON YOUR_PROGRAM.py"
        )
    elif view.up and view.devices and not view.processes:
        yield FrameNotice("note", f"no process uses {'this' if view.only_device else 'a'} GPU", "")
    if view.problems_elsewhere:
        yield FrameNotice(
            "note", f"{plural(view.problems_elsewhere, 'problem')} on other GPUs", "", advice="Esc shows them"
        )


def notice_lines(notices: Iterable[FrameNotice], width: int, rows: int) -> list[StyledLine]:
    """Return the notices in at most ``rows`` lines, the most severe first, then that of the GPU that is full soonest.

    Notices of a kind share a line if not all have one. Those without a line are counted at the end of the last line.
    Lines that are left continue the first texts that do not fit in one.
    """
    ordered = sorted(notices, key=_urgency)
    groups = [[each] for each in ordered] if len(ordered) <= rows else group_by_kind(ordered)
    shown, hidden = groups[:rows], sum(map(len, groups[rows:]))
    free_rows, lines = rows - len(shown), list[StyledLine]()
    for group in shown:
        notice, end = group[0], _count_text(group, hidden if group is shown[-1] else 0, width)
        subject, text = notice.split_subject
        rest = "; ".join(filter(None, (text, *notice.steps)))
        wrapped = [] if end else wrap_line(_styled(notice, subject, rest if text else f": {rest}"), width)
        if 1 < len(wrapped) <= 1 + free_rows:
            free_rows -= len(wrapped) - 1
            lines += wrapped
        else:
            line = _styled(notice, *in_one_line(*notice.split_subject, notice.advice, width - display_width(end)))
            lines.append([*line, Span(end)] if end else line)
    return lines


def _count_text(group: Sequence[FrameNotice], hidden: int, width: int) -> str:
    """Return the number of notices that a line stands for, besides its own; empty if there are none."""
    others, kind = len(group) - 1, group[0].kind.removeprefix("alert ")
    of_kind = f"  {kind}: {others} more" if others else ""
    text = of_kind + (f"  {hidden} more: press a" if hidden else "")
    return text if 2 * display_width(text) <= width else f"  {others + hidden} more{': press a' if hidden else ''}"


def _styled(notice: FrameNotice, subject: str, text: str) -> StyledLine:
    return [Span(subject, STYLE_BY_LEVEL[notice.level]), *([Span(text)] if text else [])]


def _urgency(notice: FrameNotice) -> tuple[int, float]:
    return [*STYLE_BY_LEVEL].index(notice.level), notice.full_in


OMITTABLE = re.compile(r" \([^()]*\)|(?<= )/\S*/")
CLAUSE = re.compile(r": | and |, which ")
FULL = re.compile(r"full in about \d+ \w+(?: \d+ \w+)?")
COMMAND = re.compile(r"gpumond [a-z-]+(?: show\b)?(?: --[a-z-]+ \S+)*")


def in_one_line(subject: str, text: str, advice: str, width: int) -> tuple[str, str]:
    """Return the subject, and text and advice after it, in one line of whole words.

    What does not fit is left out in this order: later steps, later clauses of the text, parentheses and folders, what
    precedes or follows the command, the text's last words, and the command. A time to full is kept.
    """
    facts, steps = ([*filter(None, each.split("; "))] for each in (text, advice))
    versions = [(subject, [*facts, *steps[:count]]) for count in range(len(steps), 0, -1)]
    versions += [(subject, [*facts[:count], *steps[:1]]) for count in range(len(facts), 0, -1)]
    name, *shorter = (OMITTABLE.sub("", each) for each in (subject, *facts))
    step = OMITTABLE.sub("", steps[0] if steps else "")
    found = COMMAND.search(step)
    fact, command = "".join(shorter[:1]), found[0] if found else ""
    clause, room = _first_clause(fact), width - display_width(name)
    versions += [(name, [*shorter[:count], command]) for count in range(len(shorter), 1, -1) if command]
    if full := FULL.search(text):
        words = _words_of(clause, room - display_width(full[0]) - 2)
        least = [words, full[0]] if words else [f": {full[0]}"]
        ends = [clause, full[0], command], [clause, full[0]], least
        versions = [each for each in versions if full[0] in "; ".join(each[1])] + [(name, end) for end in ends]
    versions.append((name, [fact, step]))
    if command:
        versions += [(name, [fact, command]), (name, [clause, command])]
        words = _words_of(fact, room - display_width(command) - 2)
        versions += [(name, [words, command])] if words else []
    versions += [] if command else [(name, [clause, step])]
    longest = max(
        (each for each in (_words_of(fact, room), clause) if display_width(each) <= room), key=display_width, default=""
    )
    versions += [(subject, facts[:1]), (name, shorter[:1]), (name, [longest])]
    lines = [
        (each, f"{'' if facts else ': '}{'; '.join(filter(None, parts))}") for each, parts in versions if any(parts)
    ]
    return next((line for line in lines if display_width("".join(line)) <= width), (lines or [(subject, "")])[-1])


def _first_clause(text: str) -> str:
    found = CLAUSE.search(text, 1)
    return text[: found.start()] if found else text


def _words_of(text: str, width: int) -> str:
    """Return the words of a text that fit, with an ellipsis after them."""
    words = text.split(" ")
    while words and (display_width(" ".join(words)) + 1 > width or not words[-1].rstrip(",").isalpha()):
        words.pop()  # no number without its unit
    return f"{' '.join(words).rstrip(',')}…" if words else ""


def notices_in_full(
    notices: Iterable[FrameNotice], width: int, completed: Callable[[str], str] = str
) -> list[StyledLine]:
    """Return all notices by kind, the worst first, with their texts. ``completed`` completes the commands of a text."""
    lines: list[StyledLine] = []
    for group in group_by_kind(sorted(notices, key=_urgency)):
        lines += [[]] if lines else []
        for notice in group:
            rest = completed(notice.fact.removeprefix(notice.title))
            lines += wrap_line([Span(notice.title, STYLE_BY_LEVEL[notice.level]), Span(rest)], width)
            lines += [line for step in notice.steps for line in wrap_line([Span(f"  -> {completed(step)}")], width)]
    return lines or [[Span("no alerts, verdicts or problems")]]
