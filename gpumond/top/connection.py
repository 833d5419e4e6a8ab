"""Connections to daemons: requests in threads, and the latest view of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from gpumond.facts.errors import DaemonError, GpumondError
from gpumond.facts.units import clock_text, duration_text
from gpumond.host.http import LOCAL_HOSTS
from gpumond.view.frame import MALFORMED, CheckedFrame, FrameView, frame_view, merge_views
from gpumond.view.notices import FrameNotice
from gpumond.view.text import printable_excerpt

SILENT_SECONDS = 3.0
WITHDRAWN_SECONDS = 6.0
"""Time without a response after which the values are those of the past."""
STALE_SECONDS, STALE_INTERVALS = 5.0, 3.0
STARTING_STATUS = 503

T = TypeVar("T")


class DaemonClient(Protocol):
    """The HTTP API of a daemon. All methods raise DaemonError."""

    url: str
    """As the user's commands name it."""
    reached: str
    """What requests go to."""

    def frame(self) -> CheckedFrame: ...
    def get(self, path: str) -> Any: ...
    def post(self, path: str, body: object, timeout: float) -> Any: ...


class Requests:
    """Requests in threads. ``wake`` is called in the thread when an answer is there for ``deliver``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._answers: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def ask(self, fetch: Callable[[], T], then: Callable[[T | DaemonError], None]) -> None:
        """Call the function in a new thread; ``then`` is called with the result or the error in ``deliver``."""

        def run() -> None:
            answer: T | DaemonError
            try:
                answer = fetch()
            except GpumondError as error:
                answer = error if isinstance(error, DaemonError) else DaemonError(str(error))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                answer = DaemonError(f"{MALFORMED}; check --url")
            self._answers.put(lambda: then(answer))
            self._wake()

        threading.Thread(target=run, name="gpumond-top", daemon=True).start()

    def deliver(self) -> None:
        """Call the functions of all answers so far."""
        with suppress(Empty):
            while True:
                self._answers.get_nowait()()


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """State of the connection. Times are from the local monotonic clock, as the daemon may run on another machine."""

    answered_at: float
    fresh_at: float = 0.0
    seq: int | None = None
    interval_seconds: float = 0.0
    error: str = ""
    starting: str = ""

    def updated(self, answer: FrameView | DaemonError, now: float) -> ConnectionState:
        if isinstance(answer, FrameView):
            fresh = now if answer.seq != self.seq else self.fresh_at
            return ConnectionState(now, fresh, answer.seq, answer.interval_seconds)
        if answer.status == STARTING_STATUS:
            return ConnectionState(now, starting=printable_excerpt(answer))
        return replace(self, error=printable_excerpt(answer, 400), starting="")

    def is_withdrawn(self, now: float) -> bool:
        return self.seq is None or now - self.answered_at > WITHDRAWN_SECONDS

    def notice(self, now: float, unix_now: float, several: bool) -> FrameNotice | None:
        """Return a notice about a problem with the connection, None without one. ``unix_now`` is ``now`` as Unix time.

        ``several``: there are other daemons, whose values are shown without this one's.
        """
        silence = now - self.answered_at
        if self.error or silence > SILENT_SECONDS:
            seen = self.seq is not None
            title = f"no response since {clock_text(unix_now - silence)}" if seen else "the daemon doesn't respond"
            detail = self.error or f"no response for {duration_text(silence)}"
            values = " These are the last values." if seen and not several else ""
            text = f"{detail}.{values} Retrying every second."
            return FrameNotice("bad", title, text, full_in=0.0)
        if self.starting:
            return FrameNotice("note", "starting", self.starting)
        if self.seq is None:
            return FrameNotice("note", "connecting", "waiting for the daemon's first response")
        stale = now - self.fresh_at
        if stale > max(STALE_SECONDS, STALE_INTERVALS * self.interval_seconds):
            return FrameNotice(
                "bad", f"no update for {duration_text(stale)}", "the daemon responds, but has stopped taking readings"
            )
        return None


class DaemonConnection:
    """One daemon. ``name`` distinguishes it from others; ``local``: it may run on this machine."""

    def __init__(self, daemon: DaemonClient, name: str) -> None:
        self.daemon, self.name = daemon, name
        parts = urlsplit(daemon.url)
        self.local = parts.scheme == "unix" or parts.hostname in LOCAL_HOSTS
        self.state = ConnectionState(time.monotonic())
        self.view: FrameView | None = None
        self.is_requesting = False

    def poll(self, requests: Requests, then: Callable[[], None]) -> None:
        """Request a frame unless a request is in progress. ``then`` is called after the answer."""
        if self.is_requesting:
            return
        self.is_requesting = True

        def receive(answer: FrameView | DaemonError) -> None:
            self.is_requesting = False
            self.state = self.state.updated(answer, time.monotonic())
            if isinstance(answer, FrameView):
                self.view = answer
            then()

        requests.ask(lambda: frame_view(self.daemon.frame()), receive)

    def current_view(self, now: float) -> FrameView | None:
        """Return the latest view, None if the daemon hasn't answered since."""
        return None if self.state.is_withdrawn(now) else self.view

    def notice(self, now: float, named: bool) -> FrameNotice | None:
        notice = self.state.notice(now, time.time(), named)
        return replace(notice, title=f"{self.name}: {notice.title}") if notice and named else notice


def short_names(urls: Sequence[str]) -> list[str]:
    """Return a short name for each daemon: its host, with the port if another daemon has the same host."""
    parts = [urlsplit(url) for url in urls]
    hosts = [each.hostname or url for each, url in zip(parts, urls, strict=True)]
    return [
        printable_excerpt(each.netloc.rpartition("@")[2] or host if hosts.count(host) > 1 else host, 30)
        for each, host in zip(parts, hosts, strict=True)
    ]


def combine_views(connections: Sequence[DaemonConnection], views: Sequence[FrameView | None]) -> FrameView | None:
    """Return the view of all daemons, without those of several that have none; None if none has one."""
    if len(views) == 1:
        return views[0]
    named = [(each.name, view) for each, view in zip(connections, views, strict=True)]
    return merge_views(named) if any(views) else None
