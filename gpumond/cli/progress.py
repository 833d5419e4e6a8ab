"""Progress of a command that takes long, as one line on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

QUIET_SECONDS = 2.0
"""Time for which nothing is printed, and between two lines on a terminal."""
LOG_SECONDS = 30.0

T = TypeVar("T")


class Progress:
    """From two seconds on, a text is shown: rewritten on a terminal, every half minute in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._due = time.monotonic() + QUIET_SECONDS
        self._line_is_open = False

    def show(self, text: str) -> None:
        """Show the current state, if it is time to."""
        if (now := time.monotonic()) < self._due:
            return
        start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{start}gpumond: {text}", end=end, file=sys.stderr, flush=True)
        self._line_is_open = self._terminal
        self._due = now + (QUIET_SECONDS if self._terminal else LOG_SECONDS)

    def end(self) -> None:
        """End the line of a terminal."""
        if self._line_is_open:
            print(file=sys.stderr)
            self._line_is_open = False


@contextmanager
def announce_if_slow(text: str, seconds: float = QUIET_SECONDS) -> Iterator[None]:
    """Show a text if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, print, (f"gpumond: {text}",), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_progress(items: Iterable[T], noun: str) -> Iterator[T]:
    """Yield the items and show their number. ``noun``: such as ``snapshots read``."""
    progress = Progress()
    try:
        for number, item in enumerate(items, 1):
            progress.show(f"{number:,} {noun}")
            yield item
    finally:
        progress.end()
