"""Levels at which a curve rests, and its steps from one to the next. Pure.

A curve rests when three minutes in a row are alike. A rest at another level is a step. A step up that came with
a peak from which only part was given back is a *retention*, as after an evaluation that keeps some of its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

REST_MINUTES = 3
ALIKE = 0.02
STEP = 0.05
"""As shares of the device's size."""

RETAINED = 0.08
EXCESS = 1.5
"""The peak rose at least so much as what was retained, times this."""
RETENTIONS = 2
TWICE = 2.0
STAIRS = 4
REGULAR = 1.35
"""The longest time between stairs over the shortest; the same of their heights, apart from the first, is EVEN."""
EVEN = 1.5
CLOCKWORK = 1.06
"""Stairs that come so regularly may be of any height."""
LONGEST_PAUSE = 7200.0
LARGE_STAIRS = 3
LARGE = 0.1
LARGE_PAUSE = 3600.0
"""Of so large steps, in regular time and within the hour, three will do: there is no room for many more."""


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
        return self.peak - self.before >= EXCESS * self.height


class Plateaus:
    """The level at which a curve rests, and the steps up since it last fell."""

    __slots__ = ("_left_at", "_peak", "last", "level", "steps")

    def __init__(self) -> None:
        self.level: float | None = None
        self.steps: list[PlateauStep] = []
        self.last: PlateauStep | None = None
        """The last step, up or down."""
        self._peak = 0.0
        self._left_at = 0.0

    def add(self, at: float, medians: Sequence[float], high: float, size: float) -> None:
        """``medians``: of the last minutes, the newest of which began at ``at`` and rose to ``high``."""
        newest = medians[-1]
        if self.level is not None and abs(newest - self.level) <= ALIKE * size:
            self._peak, self._left_at = high, at
        else:
            self._peak = max(self._peak, high)
        rest = medians[-REST_MINUTES:]
        if len(rest) < REST_MINUTES or max(rest) - min(rest) > ALIKE * size:
            return
        if self.level is None:
            self.level = newest
        elif abs(newest - self.level) >= STEP * size:
            self.last = PlateauStep(self._left_at, self.level, newest, self._peak)
            self.steps = [*self.steps[-(STAIRS - 1) :], self.last] if newest > self.level else []
        if abs(newest - self.level) > ALIKE * size or newest == self.level:
            self._peak, self._left_at = high, at
        self.level = newest

    def stairs(self, size: float) -> Sequence[PlateauStep]:
        """The steps that are a leak; empty if none are."""
        retained = [step for step in self.steps if step.retained and step.height >= RETAINED * size]
        pair = retained[-RETENTIONS:]
        soon = len(pair) == RETENTIONS and pair[-1].at - pair[0].at <= LONGEST_PAUSE
        if soon and _alike([step.height for step in pair], TWICE):
            return retained
        large = self.steps[-LARGE_STAIRS:]
        if len(large) == LARGE_STAIRS and min(step.height for step in large) >= LARGE * size:
            pauses = [after.at - before.at for before, after in pairwise(large)]
            if _alike(pauses, CLOCKWORK) and max(pauses) <= LARGE_PAUSE:
                return large
        if len(self.steps) < STAIRS:
            return ()
        pauses = [after.at - before.at for before, after in pairwise(self.steps)]
        heights = [step.height for step in self.steps[1:]]
        regular = (_alike(pauses, REGULAR) and _alike(heights, EVEN)) or _alike(pauses, CLOCKWORK)
        return self.steps if regular and max(pauses) <= LONGEST_PAUSE else ()


def _alike(values: Sequence[float], factor: float) -> bool:
    return max(values) <= factor * min(values)
