"""Garbage collection policy of the daemon's process: collections run only between two ticks.

docs/decisions/015-garbage-collection.md has the reasons and figures.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

COLLECT_SECONDS = 10.0
"""The shortest time between two collections."""
COLLECT_SHARE = 0.001
"""The largest share of the time that collections may take, unless the process has grown by ``GROWTH_BYTES``."""
GROWTH_BYTES = 16 << 20
"""Growth of resident memory since the last collection after which the next one does not wait for its share."""
PAGE_BYTES = resource.getpagesize()
START_SECONDS = 2.0
"""Time from the start until the objects of the start are collected: the first scrapes do not wait for this."""
FULL_EVERY = 30
"""Every 30th collection covers all generations, which takes 30 ms with 1,000 programs; the others the youngest."""


class CollectionSchedule:
    """Collects at most every ``COLLECT_SECONDS``, and less often where a collection takes long and memory is steady."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._earliest = self._due = clock() + COLLECT_SECONDS
        self._collections, self._resident = 1, resident_bytes()
        self._full_at = clock() + START_SECONDS

    def exclude_imports(self) -> None:
        """Make the next call of ``collect_if_due`` collect all generations, and exclude the objects that remain."""
        self._full_at = self._clock()

    def collect_if_due(self) -> None:
        began = self._clock()
        if began >= self._full_at:
            gc.collect()
            gc.freeze()
            self._full_at = inf
            return
        if began < self._earliest or (began < self._due and resident_bytes() - self._resident < GROWTH_BYTES):
            return
        gc.collect(0 if self._collections % FULL_EVERY else 2)
        self._collections, self._resident = self._collections + 1, resident_bytes()
        self._earliest = began + COLLECT_SECONDS
        self._due = max(self._earliest, began + (self._clock() - began) / COLLECT_SHARE)


def resident_bytes() -> int:
    """Return the resident memory of this process, from /proc."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


@contextmanager
def only_on_schedule() -> Iterator[None]:
    """Disable automatic collection. At the end this is undone, and no object is excluded from collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
