"""The garbage collector's policy for a process that serves: it runs between two ticks, never during one.

docs/decisions/015-garbage-collection.md has the reasons and figures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_SECONDS = 10.0
"""The shortest time between two collections."""
COLLECT_SHARE = 0.005
"""The largest share of the time that collections may take."""
FULL_EVERY = 30
"""Every 30th collection covers all generations, which takes 30 ms with 1,000 programs; the others the youngest."""


class CollectionSchedule:
    """Collects at most every ``COLLECT_SECONDS``, and less often where a collection takes long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due, self._collections = clock() + COLLECT_SECONDS, 1

    def collect_if_due(self) -> None:
        began = self._clock()
        if began < self._due:
            return
        gc.collect(0 if self._collections % FULL_EVERY else 2)
        self._collections += 1
        self._due = began + max(COLLECT_SECONDS, (self._clock() - began) / COLLECT_SHARE)


@contextmanager
def only_on_schedule() -> Iterator[None]:
    """Disable automatic collection, and exclude what exists now from scheduled ones. Both are undone at the end."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
