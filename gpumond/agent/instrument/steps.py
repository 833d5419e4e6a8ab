"""``step()``: counts the program's steps, and looks at the memory at the end of one, at most once a second.

Between two looks a step costs a counter and a clock. The trend is worked out where it is asked for: by a report.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations, count
from typing import NamedTuple

from gpumond.agent.instrument import usage
from gpumond.model.program import StepUsage

LOOK_SECONDS = 1.0
WINDOW = 20
"""Looks that a trend is made from: 190 pairs, about 30 microseconds."""

ENOUGH = 8


class Look(NamedTuple):
    step: int
    at: float
    live_bytes: int
    stranded_bytes: int
    retries: int


class StepCounter:
    """Those of this process."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._numbers = count(1)
        self.done = 0
        self._look_at = 0.0
        self._first_retries: int | None = None
        self._looks: deque[Look] = deque(maxlen=WINDOW)

    def mark(self) -> None:
        self.done = next(self._numbers)
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._look(now)

    def usage(self) -> StepUsage | None:
        """None before the first step."""
        looks = tuple(self._looks)
        if not self.done:
            return None
        if not looks:
            return StepUsage(self.done)
        last = looks[-1]
        retries = max(0, last.retries - (self._first_retries or 0))
        return StepUsage(self.done, _pace(looks), trend(looks), last.live_bytes, last.stranded_bytes, retries)

    def _look(self, now: float) -> None:
        seen = usage.read()
        if seen is None:
            return
        live, stranded, retries = (
            sum(level.live_bytes for level in seen.values()),
            sum(level.stranded_bytes for level in seen.values()),
            sum(level.retries for level in seen.values()),
        )
        if self._first_retries is None:
            self._first_retries = retries
        self._looks.append(Look(self.done, now, live, stranded, retries))


def trend(looks: Sequence[Look]) -> float | None:
    """Bytes by which live memory grows with a step: the median slope of all pairs (Theil 1950, Sen 1968)."""
    if len(looks) < ENOUGH:
        return None
    slopes = sorted(
        (later.live_bytes - earlier.live_bytes) / (later.step - earlier.step)
        for earlier, later in combinations(looks, 2)
        if later.step > earlier.step
    )
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


def _pace(looks: Sequence[Look]) -> float | None:
    """Steps a second over the looks."""
    passed = looks[-1].at - looks[0].at
    return (looks[-1].step - looks[0].step) / passed if passed > 0 else None


STEPS = StepCounter()
