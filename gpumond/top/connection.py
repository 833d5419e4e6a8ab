"""Requests to the daemon, the state of the connection, and the notices as single lines and in full."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any, ClassVar, Protocol, TypeVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message_pump import MessagePump

from gpumond.errors import DaemonError
from gpumond.model.units import duration
from gpumond.top.notices import FrameNotice
from gpumond.top.panel import Panel, clipped
from gpumond.top.rows import plain
from gpumond.top.view import View, view

SILENT_SECONDS = 3.0
WITHDRAWN_SECONDS = 6.0
"""Time without a response after which no number is shown."""
STALE_SECONDS, STALE_INTERVALS = 5.0, 3.0
STARTING = 503
STYLES = {"bad": "bold reverse", "warn": "bold", "note": ""}


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """State of the connection. Times are from the local monotonic clock, as the daemon may run on another machine."""

    answered_at: float
    fresh_at: float = 0.0
    seq: int | None = None
    interval_seconds: float = 0.0
    error: str = ""
    starting: str = ""

    def updated(self, answer: View | DaemonError, now: float) -> ConnectionState:
        if isinstance(answer, View):
            fresh = now if answer.seq != self.seq else self.fresh_at
            return ConnectionState(now, fresh, answer.seq, answer.interval_seconds)
        if answer.status == STARTING:
            return ConnectionState(now, starting=plain(answer))
        return replace(self, error=plain(answer, 400), starting="")

    def withdrawn(self, now: float) -> bool:
        return self.seq is None or now - self.answered_at > WITHDRAWN_SECONDS

    def notice(self, now: float) -> FrameNotice | None:
        """Return a notice about a problem with the connection, None without a problem."""
        silence = now - self.answered_at
        if self.error or silence > SILENT_SECONDS:
            numbers = ""
            if self.seq is not None:
                numbers = " Values are not shown." if self.withdrawn(now) else " Values may be out of date."
            detail = self.error or f"no response for {duration(silence)}"
            return FrameNotice("bad", "the daemon does not respond", f"{detail}.{numbers} Retrying every second.")
        if self.starting:
            return FrameNotice("note", "starting", self.starting)
        if self.seq is None:
            return FrameNotice("note", "asking", "the daemon")
        stale = now - self.fresh_at
        if stale > max(STALE_SECONDS, STALE_INTERVALS * self.interval_seconds):
            return FrameNotice(
                "bad", f"no new frame for {duration(stale)}", "the daemon responds, but produces no new frame"
            )
        return None


def headline(url: str, view: View | None, link: ConnectionState, now: float, width: int) -> Text:
    text = Text(f"gpumond {plain(url, 60)}")
    wrong = link.notice(now)
    if wrong:
        text.append("  ").append(wrong.title.upper(), STYLES[wrong.level])
    if view:
        clock = time.strftime("%H:%M:%S", time.localtime(view.taken_at))
        text.append(f"  {view.source}  frame {view.seq}  {clock}")
    return clipped(text, width)


def notice_lines(view: View | None, link: ConnectionState, now: float, width: int, rows: int) -> Text:
    """Return the notices as one line each, the most severe first, in at most ``rows`` lines."""
    lines = [_line(*each) for each in _all(view, link, now)]
    if len(lines) > rows:
        lines[rows - 1 :] = [Text(f"{len(lines) - rows + 1} more: press a")]
    return Text("\n").join(clipped(line, width) for line in lines)


class NoticesPanel(Panel):
    """All notices in full."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("a", "dismiss", show=False)]

    def show(self, view: View | None, link: ConnectionState, now: float) -> None:
        lines = [_line(*each) for each in _all(view, link, now)]
        self.set_text(Text("\n\n").join(lines) if lines else Text("no alerts, verdicts or problems"))


def _all(view: View | None, link: ConnectionState, now: float) -> Iterator[tuple[str, FrameNotice]]:
    wrong = link.notice(now)
    if wrong:
        yield "", wrong
    if view is None:
        return
    yield from (("", notice) for notice in view.notices)
    yield from (("alert ", alert) for alert in view.alerts)
    yield from (("", verdict) for verdict in view.verdicts)
    yield from (("", entry) for entry in view.stuck)
    if view.processes and not view.agents:
        yield (
            "",
            FrameNotice("note", "no program runs the agent", "start one with gpumond run -- python YOUR_PROGRAM.py"),
        )
    elif view.up and view.devices and not view.processes:
        yield "", FrameNotice("note", "no process uses a device", "")


def _line(kind: str, remark: FrameNotice) -> Text:
    line = Text().append(f"{kind}{remark.title}", STYLES[remark.level])
    return line.append(f": {remark.text}" if remark.text else "")


T = TypeVar("T")


class DaemonClient(Protocol):
    """The HTTP API of a daemon. Both methods raise DaemonError."""

    url: str

    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: object, timeout: float) -> Any: ...


def ask(asker: MessagePump, question: Callable[[], T], then: Callable[[T | DaemonError], None]) -> None:
    """Call the function in a new thread; ``then`` is called with the result or the error in the application's."""

    def run() -> None:
        answer: T | DaemonError
        try:
            answer = question()
        except DaemonError as error:
            answer = error
        except (HTTPException, OSError) as error:
            answer = DaemonError(f"the daemon closed the connection: {type(error).__name__}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            answer = DaemonError(f"the response is not from gpumond ({type(error).__name__}: {error}); check --url")
        with suppress(RuntimeError):  # the application has ended in the meantime
            asker.call_later(then, answer)

    threading.Thread(target=run, name="gpumond-top", daemon=True).start()


def read_view(daemon: DaemonClient) -> View:
    return view(daemon.get("/api/v1/frame"))
