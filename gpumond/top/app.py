"""The screen: devices, processes, the history of the selected one, and notices."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Input, Static

from gpumond.errors import DaemonError
from gpumond.top.connection import ConnectionState, DaemonClient, NoticesPanel, ask, headline, notice_lines, read_view
from gpumond.top.details import Details, HistoryChart, drawn, read_history
from gpumond.top.devices import Devices
from gpumond.top.flush import FlushPanel
from gpumond.top.panel import keys
from gpumond.top.processes import Processes, SortOrder, fitting
from gpumond.top.rows import Key
from gpumond.top.view import View, at_index, device_of, key_of, neighbour, processes_on

POLL_SECONDS = 1.0
PAST_POLLS = 5
"""Frames between two requests for the history. It is also requested when the selection changes."""
CURVE_ROWS = 2
ENOUGH_COLOURS = ("256", "truecolor", "windows")
"""Colour systems that can distinguish the shares. Sixteen colours cannot."""
NOTICES_SHARE = 4
"""Notices take at most one part in this many of the screen."""


class Top(App[None]):
    """The application. It requests one frame per second, and never more than one at a time."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; background: $primary-background; text-style: bold; }
    #past { height: 3; }
    #remarks { height: auto; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("enter", "leave_filter", show=False, priority=True),  # before the next key, which belongs to the table
        Binding("f", "flush", "Flush"),
        Binding("g", "flush_device", "GPU"),
        Binding("F", "flush_all", "all", key_display="F"),
        Binding("d", "details", "Details"),
        Binding("a", "remarks", "Alerts"),
        Binding("escape", "show_all", show=False),
        *(Binding(str(index), f"device_at({index})", show=False) for index in range(10)),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, daemon: DaemonClient, monochrome: bool = False, device: str | None = None) -> None:
        super().__init__()
        self.daemon = daemon
        self.monochrome = monochrome or self.no_color or self.console.color_system not in ENOUGH_COLOURS
        self.link = ConnectionState(time.monotonic())
        self.view: View | None = None
        self.past: HistoryChart | None = None
        self.device = device
        self._asking = False
        self._frames = 0

        self.head, self.devices, self.table = Static(id="head", markup=False), Devices(), Processes()
        self.filter_input = Input(placeholder="part of a name, pid, user, verdict or pod", id="filter")
        self.curve, self.notice_widget = Static(id="past", markup=False), Static(id="remarks", markup=False)

    def compose(self) -> ComposeResult:
        yield from (self.head, self.devices, self.table, self.filter_input, self.curve, self.notice_widget, keys())

    @property
    def shown(self) -> View | None:
        """The latest view, None if it is too old to show."""
        return None if self.link.withdrawn(time.monotonic()) else self.view

    def on_mount(self) -> None:
        self.table.focus()
        self.set_interval(POLL_SECONDS, self._poll)
        self._poll()

    def _poll(self) -> None:
        if not self._asking:
            self._asking = True
            ask(self, lambda: read_view(self.daemon), self._received)
        if self.link.notice(time.monotonic()):
            self._show()

    def _received(self, answer: View | DaemonError) -> None:
        self._asking = False
        self.link = self.link.updated(answer, time.monotonic())
        if isinstance(answer, View):
            self.view = answer
            if not device_of(answer, self.device):
                self.device = None
            if self._frames % PAST_POLLS == 0:
                self._request_history()
            self._frames += 1
        self._show()

    def _show(self) -> None:
        now, shown, width = time.monotonic(), self.shown, self.size.width
        self.head.update(headline(self.daemon.url, shown, self.link, now, width))
        self.devices.show(shown, self.monochrome, self.device)
        self.table.show(processes_on(shown, self.device) if shown else (), width)
        self.notice_widget.update(notice_lines(shown, self.link, now, width, self.size.height // NOTICES_SHARE))
        self._show_history()
        self._show_panel()

    def _subject(self) -> tuple[Key, str] | None:
        """Return the process shown in the details, else the selected device, else the selected process."""
        device, process = device_of(self.view, self.device), self.table.chosen
        if device and not isinstance(self.screen, Details):
            return key_of(device), f"GPU {device.index} {device.name} "
        return (process.key, f"{process.program} (pid {process.pid}) ") if process else None

    def _show_history(self) -> None:
        line, subject = self.curve, self._subject()
        if subject and self.past and self.past.of == subject[0]:
            line.update(drawn(self.past, subject[1], line.size.width, CURVE_ROWS))
        else:
            line.update(Text())

    def _show_panel(self) -> None:
        if isinstance(self.screen, Details):
            self.screen.show(self.shown, self.past)
        elif isinstance(self.screen, NoticesPanel):
            self.screen.show(self.shown, self.link, time.monotonic())

    def _request_history(self) -> None:
        subject, view = self._subject(), self.view
        if subject and view:
            ask(self, lambda: read_history(self.daemon, subject[0], view.taken_at), self._receive_history)

    def _receive_history(self, answer: HistoryChart | DaemonError) -> None:
        subject = self._subject()
        if isinstance(answer, HistoryChart) and subject and answer.of == subject[0]:
            self.past = answer
            self._show_history()
            self._show_panel()

    def on_resize(self) -> None:
        self._show()

    def on_data_table_row_highlighted(self) -> None:
        self._request_history_if_new()

    def _request_history_if_new(self) -> None:
        subject = self._subject()
        if subject and (self.past is None or self.past.of != subject[0]):
            self._request_history()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.action_details()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.table.filter_text = event.value
        self._show()

    def action_sort(self) -> None:
        table = self.table
        table.order = table.order.next(fitting(self.size.width - 1))
        self._show()

    def action_reverse(self) -> None:
        table = self.table
        table.order = SortOrder(table.order.column, not table.order.reverse)
        self._show()

    def action_filter(self) -> None:
        filter_input = self.filter_input
        filter_input.styles.display = "block"
        self.screen.set_focus(filter_input)  # immediately, because the next key belongs to the filter

    def action_show_all(self) -> None:
        self.filter_input.value = ""
        self.action_leave_filter()
        self._select_device(None)

    def action_device(self, step: int) -> None:
        if self.view:
            self._select_device(neighbour(self.view, self.device, step))

    def action_device_at(self, index: int) -> None:
        if self.view and (uuid := at_index(self.view, index)):
            self._select_device(uuid)

    def _select_device(self, uuid: str | None) -> None:
        self.device = uuid
        self._show()
        self._request_history_if_new()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the selection of a device if there is only one, and Enter of the filter while that has no focus."""
        if action == "leave_filter":
            return self.focused is self.filter_input
        return len(self.view.devices) > 1 if action == "device" and self.view else True

    def action_leave_filter(self) -> None:
        filter_input = self.filter_input
        if not filter_input.value:
            filter_input.styles.display = "none"
        self.screen.set_focus(self.table)

    def action_details(self) -> None:
        chosen = self.table.chosen
        if chosen:
            self.push_screen(Details(chosen.key))
            self.call_after_refresh(self._show_panel)
            self.call_after_refresh(self._request_history_if_new)

    def action_remarks(self) -> None:
        self.push_screen(NoticesPanel())
        self.call_after_refresh(self._show_panel)

    def action_flush(self) -> None:
        chosen = self.table.chosen
        if chosen:
            target = {name: value for name, value in chosen.key[1]._asdict().items() if value is not None}
            self.push_screen(FlushPanel(self.daemon, target, f"{chosen.program} (pid {chosen.pid})"))

    def action_flush_device(self) -> None:
        device, process = device_of(self.view, self.device), self.table.chosen
        uuid, gpu = (device.uuid, device.index) if device else (process.key[0], process.gpu) if process else ("", "")
        if uuid:
            self.push_screen(FlushPanel(self.daemon, {"device": uuid}, f"every program on GPU {gpu}"))

    def action_flush_all(self) -> None:
        self.push_screen(FlushPanel(self.daemon, {"all": True}, "every program with an agent"))
