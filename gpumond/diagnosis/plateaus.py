"""Levels at which a curve rests, and its steps from one to the next. No I/O.

A curve rests when three consecutive minutes are alike. A rest at another level is a step. A step up after a peak of
which only part was released is a *retention*, as after an evaluation that keeps some of its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

REST_MINUTES = 3
ALIKE_RATIO = 0.02
STEP_RATIO = 0.05
"""Tolerance of a level, and minimum height of a step, as shares of the device's size."""

PEAK_MULTIPLE = 1.5
"""Minimum rise of the peak, as a multiple of the retained bytes."""
RETENTIONS = ((2, 0.12), (3, 0.08))
"""Retentions that are a leak: their number, and the minimum height of each as a share of the device's size."""
RETENTION_HEIGHT_RATIO = 1.25
MIN_STAIRS = 4
MAX_PAUSE_RATIO = 1.35
"""Maximum ratio of the longest time between stairs to the shortest …"""
MAX_HEIGHT_RATIO = 1.5
"""… and of the highest to the lowest, without the first."""
EXACT_PAUSE_RATIO = 1.06
"""Maximum ratio of the times between stairs of any height."""
LONGEST_PAUSE_SECONDS = 7200.0
LARGE_STAIRS = 3
LARGE_RATIO = 0.1
LARGE_FIRST_RATIO = 3.0
LARGE_PAUSE_SECONDS = 3600.0
"""Large steps that are a leak: their number, minimum height as a share of the device, maximum height of the first as a
multiple of the others, since it contains the memory of the first evaluation, and longest time between two.
"""


class PlateauStep(NamedTuple):
    at: float
    before: float
    after: float
    peak: float

    @property
    def height(self) -> float:
        return self.after - self.before

    @property
    def retained(self) -> bool:
        return self.peak - self.before >= PEAK_MULTIPLE * self.height


class Plateaus:
    """Level at which a curve rests, and the steps up since it last fell."""

    __slots__ = ("_left_at", "_peak", "last", "level", "steps")

    def __init__(self) -> None:
        self.level: float | None = None
        self.steps: list[PlateauStep] = []
        self.last: PlateauStep | None = None
        """The last step, up or down."""
        self._peak = 0.0
        self._left_at = 0.0

    def add(self, at: float, medians: Sequence[float], high: float, size: float) -> None:
        """Add a minute. ``medians``: those of the last minutes, the newest of which began at ``at`` and peaked
        at ``high``.
        """
        newest = medians[-1]
        if self.level is not None and abs(newest - self.level) <= ALIKE_RATIO * size:
            self._peak, self._left_at = high, at
        else:
            self._peak = max(self._peak, high)
        rest = medians[-REST_MINUTES:]
        if len(rest) < REST_MINUTES or max(rest) - min(rest) > ALIKE_RATIO * size:
            return
        if self.level is None:
            self.level = newest
        elif abs(newest - self.level) >= STEP_RATIO * size:
            self.last = PlateauStep(self._left_at, self.level, newest, self._peak)
            self.steps = [*self.steps[-(MIN_STAIRS - 1) :], self.last] if newest > self.level else []
        if abs(newest - self.level) > ALIKE_RATIO * size or newest == self.level:
            self._peak, self._left_at = high, at
        self.level = newest

    def stairs(self, size: float) -> Sequence[PlateauStep]:
        """Return the steps that are a leak; empty if none are."""
        for number, ratio in RETENTIONS:
            retained = [step for step in self.steps if step.retained and step.height >= ratio * size]
            last = retained[-number:]
            soon = len(last) == number and last[-1].at - last[-2].at <= LONGEST_PAUSE_SECONDS
            if soon and _alike([step.height for step in last], RETENTION_HEIGHT_RATIO):
                return retained
        large = self.steps[-LARGE_STAIRS:]
        if len(large) == LARGE_STAIRS and min(step.height for step in large) >= LARGE_RATIO * size:
            pauses = [after.at - before.at for before, after in pairwise(large)]
            first, *heights = (step.height for step in large)
            even = _alike(heights, MAX_HEIGHT_RATIO) and _alike([first, *heights], LARGE_FIRST_RATIO)
            if even and _alike(pauses, EXACT_PAUSE_RATIO) and max(pauses) <= LARGE_PAUSE_SECONDS:
                return large
        if len(self.steps) < MIN_STAIRS:
            return ()
        pauses = [after.at - before.at for before, after in pairwise(self.steps)]
        heights = [step.height for step in self.steps[1:]]
        regular = (_alike(pauses, MAX_PAUSE_RATIO) and _alike(heights, MAX_HEIGHT_RATIO)) or _alike(
            pauses, EXACT_PAUSE_RATIO
        )
        return self.steps if regular and max(pauses) <= LONGEST_PAUSE_SECONDS else ()


def _alike(values: Sequence[float], factor: float) -> bool:
    return max(values) <= factor * min(values)
