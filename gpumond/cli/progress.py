"""Progress of long work on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
QUIET_SECONDS = 2.0
"""Time for which nothing is printed, and between two lines."""


def progressing(items: Iterable[T], what: str = "snapshots") -> Iterator[T]:
    """Yield the items. Their number is printed from two seconds on: in one line that is rewritten on a terminal, and
    every half minute in a log.
    """
    terminal = sys.stderr.isatty()
    due = time.monotonic() + QUIET_SECONDS
    printed = False
    for number, item in enumerate(items, 1):
        if (now := time.monotonic()) >= due:
            start, end = ("\r", "") if terminal else ("", "\n")
            print(f"{start}gpumond: {number:,} {what} read", end=end, file=sys.stderr, flush=True)
            due, printed = now + (QUIET_SECONDS if terminal else 15 * QUIET_SECONDS), True
        yield item
    if printed and terminal:
        print(file=sys.stderr)
