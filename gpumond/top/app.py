"""The application: it requests one frame per second from each daemon, handles keys and the mouse, and draws."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from gpumond.cli.client import with_commands
from gpumond.facts.errors import DaemonError
from gpumond.host.machine import reduce_garbage_collection
from gpumond.top import screen
from gpumond.top.connection import STALE_INTERVALS, DaemonClient, DaemonConnection, Requests, combine_views, short_names
from gpumond.top.dialogs import (
    ColumnDialog,
    FlushDialog,
    FlushTarget,
    SignalDialog,
    SilenceDialog,
    SuspensionDialog,
    why_panel,
)
from gpumond.top.events import EventsDialog
from gpumond.top.processes import TREE, AncestorCache, ProcessList, ProcessStats, column_at, saved_columns
from gpumond.top.screen import (
    HistoryChart,
    Panel,
    Screen,
    all_notices,
    chart_lines,
    detail_lines,
    edit_text,
    extend_history,
    help_lines,
    notices_in_full,
    read_history,
    read_utilization,
)
from gpumond.top.terminal import Mouse, Terminal
from gpumond.view.frame import (
    FrameView,
    device_at_index,
    device_of,
    history_key_of,
    neighbor_uuid,
    processes_on,
    split_merged_uuid,
    view_of_device,
)
from gpumond.view.notices import FrameNotice
from gpumond.view.rows import ProcessOnDevice, ProcessRow, SubjectKey
from gpumond.view.text import BLOCKS, GAP_SECONDS, Span, StyledLine, ansi, colors_of

POLL_SECONDS = 1.0
WHEEL_ROWS = 3
DETAIL_CHART_ROWS = 4
GROUP_HINT = "Enter opens a group"


class TopApp:
    """The application. ``device``: UUID of the device that is selected first. ``columns``: names of those of the table.
    Without ``columns``, those that were last chosen.
    """

    def __init__(
        self,
        daemons: Sequence[DaemonClient],
        device: str | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        urls = [daemon.url for daemon in daemons]
        self.connections = [DaemonConnection(*each) for each in zip(daemons, short_names(urls), strict=True)]
        self.terminal, self.colors, self.device = Terminal(), colors_of(os.environ), device
        self.monochrome = self.colors == "none"
        self.requests = Requests(self.terminal.wake)
        self.table = ProcessList(self.monochrome, columns or saved_columns())
        self.screen = Screen(self.monochrome, self.terminal.can_show(BLOCKS))
        self.ancestors = AncestorCache()
        self.process_stats = ProcessStats()
        self.panel: Panel | None = None
        self.view: FrameView | None = None
        self.paused_view: FrameView | None = None
        self.silent = False
        self._latest: FrameView | None = None
        self._views: list[FrameView | None] = [None] * len(self.connections)
        self.history: HistoryChart | None = None
        self.message = ""
        self._is_requesting_history = False
        self._filtering = False
        self._is_quitting = False
        self._actions = self._keys()

    def _keys(self) -> Mapping[str, Callable[[], None]]:
        table = self.table
        return {
            **dict.fromkeys(("q", "f10", "ctrl-c"), self._quit),
            **dict.fromkeys(("?", "h", "f1"), lambda: self._open(Panel(help_lines, ("?", "h", "f1")))),
            **dict.fromkeys(("/", "f3", "f4"), self._filter),
            **dict.fromkeys(("s", ">", "."), lambda: self._sort(1)),
            **dict.fromkeys(("<", ","), lambda: self._sort(-1)),
            **dict.fromkeys(("r", "I"), self._reverse),
            **dict.fromkeys(("t", "f5"), self._tree),
            **dict.fromkeys(("K", "f9"), self._signal),
            **dict.fromkeys(("enter", "d"), self._details),
            "g": table.next_grouping,
            **dict.fromkeys(("x", " "), self._mark),
            "U": lambda: table.marks.clear(),
            "w": self._why,
            "f": lambda: self._flush(self._target_rows()),
            "F": self._flush_device,
            "z": lambda: self._open_suspension("suspend"),
            "Z": lambda: self._open_suspension("resume"),
            "S": self._silence,
            "e": self._events,
            "c": self._columns,
            "a": lambda: self._open(Panel(self._all_notice_lines, ("a", "enter"))),
            "p": self._pause,
            "escape": self._show_all,
            "left": lambda: self._step_device(-1),
            "right": lambda: self._step_device(1),
        }

    def run(self) -> None:
        """Run until the user quits. Raises SystemExit if the terminal is closed, or at SIGTERM."""
        reduce_garbage_collection()
        with self.terminal:
            due = time.monotonic()
            while not self._is_quitting:
                if time.monotonic() >= due:
                    due = time.monotonic() + POLL_SECONDS
                    self._poll()
                self._draw()
                keys = self.terminal.keys(due - time.monotonic())
                for key in keys:
                    if isinstance(key, Mouse):
                        self._mouse(key)
                    else:
                        self._press(key)
                self.requests.deliver()

    # what is shown

    def _refresh(self) -> None:
        """Determine the view to show: that of the pause, else the latest. ``silent``: no daemon has answered lately."""
        now = time.monotonic()
        views = [each.current_view(now) for each in self.connections]
        if any(view is not before for view, before in zip(views, self._views, strict=True)):
            latest = combine_views(self.connections, views)
            self._views, self._latest, self.silent = views, latest or self._latest, latest is None
        self.view = self.paused_view or self._latest

    def _connection_to(self, uuid: str) -> tuple[DaemonConnection, str]:
        """Return the connection to the daemon of a device, and its own UUID for it."""
        index, own_uuid = split_merged_uuid(uuid) if len(self.connections) > 1 else (0, uuid)
        return self.connections[index], own_uuid

    def _notices(self) -> list[FrameNotice]:
        now, several = time.monotonic(), len(self.connections) > 1
        found = (each.notice(now, several) for each in self.connections)
        return [] if self.paused_view else [notice for notice in found if notice]

    def _poll(self) -> None:
        for connection in self.connections:
            connection.poll(self.requests, self._received)

    def _received(self) -> None:
        self._refresh()
        view = self.view
        if self._latest:
            self.screen.sensors.add(self._latest)
        if view and not device_of(view, self.device):
            self.device = None
        if view and self.history:
            missed = view.taken_at - self.history.until > max(GAP_SECONDS, STALE_INTERVALS * view.interval_seconds)
            self.history = None if missed else extend_history(self.history, view)

    def _subject(self) -> tuple[SubjectKey, str] | None:
        """Return the selected device, else the process under the cursor; in its details always the process."""
        view = self.view
        device, row = device_of(view, self.device), self.table.selected_row
        if device and self.panel is None:
            return history_key_of(device), f"GPU {device.label} {device.name} "
        if view is None or row is None or row.members:
            return None
        return row.key, f"{row.process.program} (pid {row.process.pid}) "

    def _request_history(self) -> None:
        """Request the history of the subject unless it is there or a request is in progress."""
        subject, view = self._subject(), self.view
        if (
            subject is None
            or view is None
            or self._is_requesting_history
            or (self.history and self.history.key == subject[0])
        ):
            return
        self._is_requesting_history = True
        connection, uuid = self._connection_to(subject[0][0])
        key, until = subject[0], view.taken_at

        def receive(answer: HistoryChart | DaemonError) -> None:
            self._is_requesting_history = False
            self.history = answer if isinstance(answer, HistoryChart) else HistoryChart(key, until, ())

        self.requests.ask(lambda: read_history(connection.daemon, uuid, key, until), receive)

    def _request_utilization(self) -> None:
        """Request the earlier utilization of the devices whose curves are shown, once."""
        sensors, view = self.screen.sensors, self.view
        while view and sensors.unread:
            uuid = sensors.unread.pop()
            connection, own_uuid = self._connection_to(uuid)

            def receive(answer: list[tuple[float, float]] | DaemonError, uuid: str = uuid) -> None:
                if not isinstance(answer, DaemonError):
                    sensors.prepend(uuid, answer)

            self.requests.ask(partial(read_utilization, connection.daemon, own_uuid, view.taken_at), receive)

    def _chart(self, width: int, rows: int, named: bool = True) -> list[StyledLine]:
        subject = self._subject()
        if subject is None or self.history is None or self.history.key != subject[0]:
            return []
        rows = rows if self.terminal.can_show(BLOCKS) else 0
        return chart_lines(self.history, subject[1] if named else "", width, rows, self.screen.monochrome)

    def _draw(self) -> None:
        self._refresh()
        width, height = self.terminal.size()
        view, notices = self.view, self._notices()
        rows = processes_on(view, self.device) if view else ()
        local = [row.key[1] for row in rows if self._connection_to(row.key[0])[0].local]
        stats = self.process_stats.read(dict.fromkeys(local))
        rows = tuple(replace(row, host=stats.get(row.key[1])) for row in rows) if stats else rows
        if view:
            self.table.marks &= {row.key for row in view.processes}
        self.table.fill(rows, self.ancestors.read(local if self.table.grouping == TREE else ()))
        self._request_history()
        silent = self.silent and self.paused_view is None
        self.screen.monochrome = self.table.monochrome = self.monochrome or silent
        head = screen.head_line(self.connections, notices, view, self.paused_view is not None, width)
        if self.panel:
            body = screen.panel_lines(self.panel, width, height - 2)
            hints = self.panel.hints
        else:
            body = self.screen.lines(
                view, notices, self.table, self.device, self._filtering, self._chart, width, height - 2, silent
            )
            hints = screen.FILTER_HINTS if self._filtering else screen.HINTS
        self._request_utilization()
        lines = screen.whole_screen(head, body, self.message, hints, width, height)
        self.terminal.draw([ansi(line, self.colors) for line in lines])

    def _all_notice_lines(self, width: int) -> list[StyledLine]:
        urls = [each.daemon.url for each in self.connections]
        completed = partial(with_commands, url=urls[0]) if len(urls) == 1 else str
        concerned = self.view and view_of_device(self.view, self.device)
        return notices_in_full(all_notices(concerned, self._notices()), width, completed)

    # keys and mouse

    def _press(self, key: str) -> None:
        self.message = ""
        if key == "ctrl-c":
            self._quit()
        elif self.panel:
            self._press_in_panel(self.panel, key)
        elif self._filtering and len(key) == 1:
            self._edit_filter(key)
        elif key in _ROWS_BY_KEY or key in ("pageup", "pagedown"):
            self.table.move(self._rows_of(key))
        elif self._filtering:
            self._edit_filter(key)
        elif key.isdecimal() and len(key) == 1:
            self._select_device(device_at_index(self.view, int(key)) if self.view else None, keep=True)
        elif key in self._actions:
            self._actions[key]()

    def _rows_of(self, key: str) -> int:
        page = self.screen.page
        return {"pageup": -page, "pagedown": page}.get(key) or _ROWS_BY_KEY[key]

    def _press_in_panel(self, panel: Panel, key: str) -> None:
        if panel.entry is not None and (entry := edit_text(panel.entry, key)) != panel.entry:
            panel.entry = entry
        elif key in panel.closing:
            self.panel = None
        elif key in panel.keys:
            panel.keys[key]()
        elif key in _ROWS_BY_KEY or key in ("pageup", "pagedown"):
            panel.scroll(self._rows_of(key))

    def _edit_filter(self, key: str) -> None:
        table = self.table
        if key in ("enter", "escape"):
            self._filtering = False
            table.filter_text = "" if key == "escape" else table.filter_text
        else:
            table.filter_text = edit_text(table.filter_text, key)

    def _mouse(self, mouse: Mouse) -> None:
        if mouse.action != "press":
            rows = -WHEEL_ROWS if mouse.action == "up" else WHEEL_ROWS
            (self.panel.scroll if self.panel else self.table.move)(rows)
            return
        for part, (top, height) in self.screen.parts.items():
            if self.panel is None and top <= mouse.row < top + height:
                if part == "table":
                    self._click_table(mouse, mouse.row - top)
                else:
                    self._click_device(mouse.row - top)

    def _click_table(self, mouse: Mouse, row: int) -> None:
        table = self.table
        if row:
            if table.first_visible + row - 1 < len(table.rows):
                table.select(table.first_visible + row - 1)
            return
        if column := column_at(table.columns_in(self.terminal.size()[0]), mouse.column):
            table.order = table.order.sorted_by(column.name)

    def _click_device(self, row: int) -> None:
        index = self.screen.device_of(row)
        if self.view and index is not None:
            self._select_device(self.view.devices[index].uuid)

    # actions

    def _quit(self) -> None:
        self._is_quitting = True

    def _open(self, panel: Panel) -> None:
        self.panel = panel

    def _filter(self) -> None:
        self._filtering = True

    def _sort(self, step: int) -> None:
        self.table.order = self.table.order.next(self.table.columns_in(self.terminal.size()[0]), step)

    def _reverse(self) -> None:
        self.table.order = self.table.order.sorted_by(self.table.order.column)

    def _tree(self) -> None:
        self.table.grouping = "" if self.table.grouping == TREE else TREE

    def _mark(self) -> None:
        if row := self.table.selected_row:
            self.table.toggle_marks(row)
            self.table.move(1)

    def _pause(self) -> None:
        self.paused_view = None if self.paused_view else self.view

    def _show_all(self) -> None:
        self.table.filter_text = ""
        self.table.marks.clear()
        self.device = None

    def _step_device(self, step: int) -> None:
        if (view := self.view) and len(view.devices) > 1:
            self._select_device(neighbor_uuid(view, self.device, step))

    def _select_device(self, uuid: str | None, keep: bool = False) -> None:
        """Select a device, or all. ``keep``: do nothing without a device."""
        self.device = self.device if keep and uuid is None else uuid

    def _columns(self) -> None:
        self.panel = ColumnDialog(self.table, self.terminal.size()[0]).panel

    def _details(self) -> None:
        row = self.table.selected_row
        if row and row.members:
            self.table.toggle_group(row)
        elif row:
            key = row.key
            flush = {"f": lambda: self._flush(self._rows_of_process(key))}
            self.panel = Panel(lambda width: self._process_details(key, width), ("enter", "d"), flush)

    def _why(self) -> None:
        row = self.table.selected_row
        if row and not row.members:
            self.panel = why_panel(self.requests, self._connection_to(row.key[0])[0].daemon, row.process)
        elif row:
            self.message = f"w works on one program; {GROUP_HINT}"

    def _rows_of_process(self, key: ProcessOnDevice) -> list[ProcessRow]:
        """Return the process, nothing if it no longer uses a GPU."""
        return [row for row in self.view.processes if row.key == key] if self.view else []

    def _process_details(self, key: ProcessOnDevice, width: int) -> list[StyledLine]:
        rows = self._rows_of_process(key)
        if not rows:
            return [[Span(f"pid {key[1].pid} no longer uses a GPU")]]
        row = replace(rows[0], host=self.process_stats.read([key[1]]).get(key[1]))
        free = self.terminal.size()[1] - 4 - len(detail_lines(row, (), width))
        chart = (
            self._chart(width, max(DETAIL_CHART_ROWS, free), named=False)
            if self.history and self.history.key == key
            else []
        )
        return detail_lines(row, chart, width)

    def _target_rows(self) -> list[ProcessRow]:
        """Return the marked processes, else those of the row under the cursor; one row for each process."""
        marked = [row for row in self.view.processes if row.key in self.table.marks] if self.view else []
        selected = self.table.selected_row
        rows = marked or ([*selected.processes] if selected else [])
        return [*{(self._connection_to(row.key[0])[0].name, row.key[1]): row for row in rows}.values()]

    def _flush(self, rows: Sequence[ProcessRow]) -> None:
        targets = []
        for row in rows:
            body = {name: value for name, value in row.key[1]._asdict().items() if value is not None}
            targets.append(
                FlushTarget(self._connection_to(row.key[0])[0].daemon, body, f"{row.program} (pid {row.pid})")
            )
        if targets:
            self._ask_flush(targets, targets[0].name if len(targets) == 1 else f"{len(targets)} processes")

    def _flush_device(self) -> None:
        device = device_of(self.view, self.device)
        if device:
            connection, uuid = self._connection_to(device.uuid)
            name = f"every program on GPU {device.label}"
            self._ask_flush([FlushTarget(connection.daemon, {"device": uuid}, name)], name)
        else:
            name = "every program with an agent"
            self._ask_flush([FlushTarget(each.daemon, {"all": True}, each.name) for each in self.connections], name)

    def _ask_flush(self, targets: Sequence[FlushTarget], name: str) -> None:
        def done(summary: str) -> None:
            self.message = "" if self.panel is panel else summary

        panel = self.panel = FlushDialog(self.requests, targets, name, done).panel

    def _open_suspension(self, action: Literal["suspend", "resume"]) -> None:
        """Suspend or resume one program: the marked one, or else the one under the cursor."""
        rows = self._target_rows()
        if len(rows) == 1:
            (row,) = rows
            daemon, name = self._connection_to(row.key[0])[0].daemon, f"{row.program} (pid {row.pid})"
            self.panel = SuspensionDialog(self.requests, daemon, row.pid, name, action).panel
        elif rows:
            unmark = "U removes the marks" if self.table.marks else GROUP_HINT
            self.message = f"you can {action} one program at a time; {unmark}"

    def _silence(self) -> None:
        row = self.table.selected_row
        connection = self._connection_to(row.key[0])[0] if row and not row.members else self.connections[0]
        self.panel = SilenceDialog(self.requests, connection.daemon, row.process.pid if row else None).panel

    def _events(self) -> None:
        """Show the events of the daemon of the selected device or, without one, of the row under the cursor."""
        row = self.table.selected_row
        device_uuid = self.device or (row.key[0] if row and not row.members else None)
        connection = self._connection_to(device_uuid)[0] if device_uuid else self.connections[0]
        places = [
            (device.label, *self._connection_to(device.uuid)) for device in (self.view.devices if self.view else ())
        ]
        gpus = {uuid: label for label, each, uuid in places if each is connection}
        uuid = self._connection_to(self.device)[1] if self.device else None
        name = connection.name if len(self.connections) > 1 else ""
        self.panel = EventsDialog(self.requests, connection.daemon, uuid, gpus, name).panel

    def _signal(self) -> None:
        if rows := self._target_rows():
            self.panel = SignalDialog([(row, self._connection_to(row.key[0])[0].local) for row in rows]).panel


_ROWS_BY_KEY = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -(1 << 30), "end": 1 << 30}
