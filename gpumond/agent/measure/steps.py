"""``step()``: counts the program's steps, and reads the memory at the end of a step, at most once a second.

Between two samples a step costs one counter and one clock. The trend is computed when a report requests it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations, count
from typing import NamedTuple

from gpumond.agent.measure import usage
from gpumond.facts.program import StepUsage

SAMPLE_SECONDS = 1.0
WINDOW = 20
"""Number of samples in a trend: 190 pairs, about 30 microseconds."""

MIN_SAMPLES = 8


class Sample(NamedTuple):
    step: int
    at: float
    live_bytes: int
    stranded_bytes: int
    retries: int


class StepCounter:
    """The steps of this process."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._numbers = count(1)
        self.done = 0
        self._sample_at = 0.0
        self._first_retries: int | None = None
        self._samples: deque[Sample] = deque(maxlen=WINDOW)

    def mark(self) -> None:
        self.done = next(self._numbers)
        now = time.monotonic()
        if now >= self._sample_at:
            self._sample_at = now + SAMPLE_SECONDS
            self._sample(now)

    def usage(self) -> StepUsage | None:
        """Return None before the first step."""
        samples = tuple(self._samples)
        if not self.done:
            return None
        if not samples:
            return StepUsage(steps=self.done)
        last = samples[-1]
        retries = max(0, last.retries - (self._first_retries or 0))
        return StepUsage(
            steps=self.done,
            steps_per_second=_pace(samples),
            kept_bytes=trend(samples),
            live_bytes=last.live_bytes,
            stranded_bytes=last.stranded_bytes,
            retries=retries,
        )

    def _sample(self, now: float) -> None:
        levels = usage.read()
        if levels is None:
            return
        live, stranded, retries = (
            sum(level.live_bytes for level in levels.values()),
            sum(level.stranded_bytes for level in levels.values()),
            sum(level.retries for level in levels.values()),
        )
        if self._first_retries is None:
            self._first_retries = retries
        self._samples.append(Sample(self.done, now, live, stranded, retries))


def trend(samples: Sequence[Sample]) -> float | None:
    """Return the growth of live memory in bytes for each step: the median slope of all pairs (Theil 1950, Sen 1968)."""
    if len(samples) < MIN_SAMPLES:
        return None
    slopes = sorted(
        (later.live_bytes - earlier.live_bytes) / (later.step - earlier.step)
        for earlier, later in combinations(samples, 2)
        if later.step > earlier.step
    )
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


def _pace(samples: Sequence[Sample]) -> float | None:
    """Return the steps per second over the samples."""
    passed = samples[-1].at - samples[0].at
    return (samples[-1].step - samples[0].step) / passed if passed > 0 else None


STEPS = StepCounter()
