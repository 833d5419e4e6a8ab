"""Number of a program's live allocations while its memory grows. No I/O.

The number rises with memory that the program keeps, and not while a few allocations become larger. It varies within the
steps of a program: the smallest number in each block of 15 s is compared.
"""

from __future__ import annotations

from typing import NamedTuple

MIN_SECONDS = 60.0
"""Minimum time between the two blocks that are compared."""
RISING_RATIO = 0.02
"""Limit between both cases: additional allocations would be 50 times as large as the others are on average."""
ERROR_RATIO = 0.1
"""Error of the smallest number, as a share of the range of the numbers in a block, which has about 15 samples."""


class AllocationGrowth(NamedTuple):
    """Growth of the number of live allocations.

    ``ratio``: relative growth of the number as a share of that of the live bytes, None if these have not grown.
    ``rises``: whether the number rises with the bytes; None if that is not certain.
    """

    per_minute: float
    ratio: float | None
    rises: bool | None

    @property
    def evidence(self) -> list[tuple[str, float]]:
        known = [] if self.ratio is None else [("live_allocations_growth_ratio", self.ratio)]
        return [("live_allocations_per_minute", self.per_minute), *known]


class _Begin(NamedTuple):
    at: float
    number: int
    live_bytes: float


class LiveAllocations:
    """Numbers of the last block of 15 s, and of the block in which a verdict on growth began."""

    __slots__ = ("_begin", "_closed", "_open")

    def __init__(self) -> None:
        self._begin: _Begin | None = None
        self._open: tuple[int, int] | None = None
        """Smallest and largest number of the block that has not closed yet; None if they are unknown."""
        self._closed: tuple[int, int] | None = None

    def add(self, number: int | None, closes: bool) -> None:
        """Add the number of one sample. ``closes``: the sample is the first one of a new block."""
        if closes:
            self._closed, self._open = self._open, None
        if number is None:
            return
        low, high = self._open or (number, number)
        if self._open is None or number < low or number > high:
            self._open = min(low, number), max(high, number)

    def growth(self, at: float, live_bytes: float, pace: float) -> AllocationGrowth | None:
        """Return the growth since the first call after `end`; None if it is unknown, or too short.

        ``at`` and ``live_bytes``: time and smallest live bytes of the last block.
        """
        if self._closed is None:
            return None
        low, high = self._closed
        if self._begin is None:
            self._begin = _Begin(at, low, live_bytes)
        begin = self._begin
        if at - begin.at < MIN_SECONDS:
            return None
        per_minute = 60.0 * pace * (low - begin.number) / (at - begin.at)
        expected = begin.number * (live_bytes / begin.live_bytes - 1.0) if begin.live_bytes > 0 else 0.0
        if not expected > 0:
            return AllocationGrowth(per_minute, None, None)
        ratio, error = (low - begin.number) / expected, ERROR_RATIO * (high - low) / expected
        rises = None if abs(ratio - RISING_RATIO) <= error else ratio > RISING_RATIO
        return AllocationGrowth(per_minute, ratio, rises)

    def end(self) -> None:
        """Record that no verdict on growth is active."""
        self._begin = None
