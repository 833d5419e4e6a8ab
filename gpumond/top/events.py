"""The panel of events: those of one cause in a line, what would have prevented out-of-memory errors, and the minute
before one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpumond.cli.client import with_commands
from gpumond.facts.errors import DaemonError
from gpumond.facts.units import clock_text
from gpumond.top.connection import DaemonClient, Requests
from gpumond.top.dialogs import selection_keys
from gpumond.top.screen import Hints, Panel
from gpumond.view.events import group_events, group_text, happened_at, repeat_key
from gpumond.view.moments import NOT_FOUND, Entry, holdings_at, table_at
from gpumond.view.text import Span, StyledLine, cut, printable_excerpt, time_text, wrap_line, wrap_text

PAGE_EVENTS, ALL_EVENTS = 10, 1 << 30
"""Events that a key moves by."""
BEFORE_SECONDS = 60.0
Moments = tuple[Sequence[str], Sequence[Sequence[Entry]]]
"""Times, and who held what at each."""


class EventsDialog:
    """The events since the daemon's start, the newest first. ``uuid``: only those of a device, and of none.

    ``gpus``: the labels of devices by UUID. ``name``: that of the daemon if there are several.
    """

    def __init__(
        self, requests: Requests, daemon: DaemonClient, uuid: str | None, gpus: Mapping[str, str], name: str = ""
    ) -> None:
        pages = {"pageup": -PAGE_EVENTS, "pagedown": PAGE_EVENTS, "home": -ALL_EVENTS, "end": ALL_EVENTS}
        keys: dict[str, Callable[[], None]] = {
            **selection_keys(self._select),
            **{key: partial(self._select, step) for key, step in pages.items()},
        }
        keys |= {"right": self._read_minute, "left": self._return}
        self.panel = Panel(self._lines, ("e", "enter"), keys, self._hints)
        self.requests, self.daemon, self.uuid, self.gpus = requests, daemon, uuid, gpus
        label = gpus.get(uuid or "")
        of = f" of GPU {label}" if label else f" of {name}" if name else ""
        self.title = f"events{of} until {clock_text(time.time())}, newest first"
        self.groups: list[list[Mapping[str, Any]]] = []
        self.remedies: list[str] = []
        self.cursor = 0
        self.result = "waiting for the daemon"
        self.minute: Moments | str | None = None
        self._selection_changed = False
        self.requests.ask(self._read, self._receive)

    def _hints(self) -> Hints:
        if not self.groups:
            return ()
        switch = ("→", "Minute before") if self.minute is None else ("←", "Events")
        return (("↑↓", "Event"), switch, ("esc", "Close"))

    def _read(self) -> tuple[list[list[Mapping[str, Any]]], list[str]]:
        found = self.daemon.get("/api/v1/events")
        cases = self.daemon.get("/api/v1/oom")
        groups = group_events(each for each in found if self.uuid is None or each["device_uuid"] in (None, self.uuid))
        return groups[::-1], [_remedy(group[0], cases) for group in reversed(groups)]

    def _receive(self, found: tuple[list[list[Mapping[str, Any]]], list[str]] | DaemonError) -> None:
        if isinstance(found, DaemonError):
            self.result = printable_excerpt(str(found), 600)
            return
        (self.groups, self.remedies), self.result = found, "no events since the daemon's start"

    def _select(self, step: int) -> None:
        self.cursor = max(0, min(self.cursor + step, len(self.groups) - 1))
        if self.minute is not None:
            self._read_minute()
        self._selection_changed = True

    def _return(self) -> None:
        self.minute = None
        self._select(0)

    def _read_minute(self) -> None:
        """Request who held what a minute before the chosen event and at it: at it alone if before isn't known."""
        if not self.groups:
            return
        event = self.groups[self.cursor][0]
        at = happened_at(event)
        self.minute, self.panel.first_line = "waiting for the daemon", 0

        def fetch() -> Moments:
            last = holdings_at(self.daemon.get, at, event["device_uuid"])
            try:
                return (time_text(at - BEFORE_SECONDS), time_text(at)), (
                    holdings_at(self.daemon.get, at - BEFORE_SECONDS, event["device_uuid"]),
                    last,
                )
            except DaemonError as error:
                if error.status != NOT_FOUND:
                    raise
                return (time_text(at),), (last,)

        def receive(found: Moments | DaemonError) -> None:
            if self.minute is not None and self.groups[self.cursor][0] is event:
                self.minute = printable_excerpt(str(found), 600) if isinstance(found, DaemonError) else found

        self.requests.ask(fetch, receive)

    def _lines(self, width: int) -> list[StyledLine]:
        if not self.groups:
            return wrap_line([Span(self.result)], width)
        if self.minute is None:
            parts = [[*self._group_lines(at, width)] for at in range(len(self.groups))]
            if self._selection_changed:
                above = sum(map(len, parts[: self.cursor])) + 1
                self._selection_changed, self.panel.revealed = False, (above, above + len(parts[self.cursor]) - 1)
            return [[Span(self.title, "bold")], *(line for part in parts for line in part)]
        text = self.minute if isinstance(self.minute, str) else table_at(*self.minute, self.gpus, width)
        title, *rows = text.split("\n")
        table = [*wrap_line([Span(title)], width), *([Span(row)] for row in rows)]
        return [*self._group_lines(self.cursor, width), [], *table]

    def _group_lines(self, at: int, width: int) -> Iterator[StyledLine]:
        """Yield the lines of a group: all of its events if it is chosen, else the one that tells most."""
        group, now = self.groups[at], time.time()
        is_selected = at == self.cursor
        alike = [each for each in group if repeat_key(each) == repeat_key(group[0])]
        text = group_text(group if is_selected else alike, lambda at: clock_text(at, now).removesuffix(" UTC"))
        if is_selected:
            yield from ([Span(line, "chosen")] for line in wrap_text(text, width).split("\n"))
        else:
            count_text = f"  +{len(group) - len(alike)}" if len(group) > len(alike) else ""
            yield [Span(cut(text.split("\n")[0], width - len(count_text)) + count_text)]
        if self.remedies[at]:
            remedy = with_commands(f"  -> {self.remedies[at]}", self.daemon.url)
            yield from wrap_line([Span(remedy if is_selected else cut(remedy, width))], width)


def _remedy(event: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str:
    """Return what would have prevented an out-of-memory error; empty for other events. One case has several errors."""
    number = dict(event["details"]).get("number") if event["kind"] == "oom" else None
    of_process = [each for each in cases if (each["pid"], each["start_ticks"]) == (event["pid"], event["start_ticks"])]
    numbered = {count: each for each in of_process if (count := int(each["id"].rpartition("-")[2])) <= (number or 0)}
    return printable_excerpt(numbered[max(numbered)]["remedy"], 400) if numbered else ""
