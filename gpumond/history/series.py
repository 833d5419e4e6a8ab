"""Samples and blocks of one device, or of one process on a device, in rows of numbers. No I/O."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import floor, inf, nan
from typing import NamedTuple

SAMPLES = 900
SHORTEST_SECONDS = 0.75
"""Minimum distance of two samples; a closer one is dropped."""


class Tier(NamedTuple):
    seconds: int
    rows: int


TIERS = (Tier(15, 240), Tier(60, 240), Tier(300, 144), Tier(900, 96))
MINUTE, FIVE_MINUTES, QUARTER = 1, 2, 3
"""Indices in TIERS."""
MIN, MEDIAN, MAX = 0, 1, 2
"""Indices in a block."""


class Rows:
    """The newest ``capacity`` rows of ``width`` numbers each."""

    __slots__ = ("_capacity", "_data", "_head", "width")

    def __init__(self, width: int, capacity: int) -> None:
        self.width = width
        self._capacity = width * capacity
        self._data = array("d")
        self._head = 0

    def __len__(self) -> int:
        return len(self._data) // self.width

    @property
    def bytes(self) -> int:
        """Size in bytes, including the array's spare capacity."""
        return self._data.__sizeof__()

    def append(self, row: Sequence[float]) -> Sequence[float] | None:
        """Append a row and return the row that it replaces, if any."""
        if len(self._data) < self._capacity:
            self._data.extend(row)
            return None
        head = self._head
        gone = self._data[head : head + self.width]
        self._data[head : head + self.width] = array("d", row)
        self._head = (head + self.width) % self._capacity
        return gone

    def newest(self, count: int) -> array[float]:
        """Return the last ``count`` rows, or all if there are fewer, concatenated, the oldest first."""
        data, head = self._data, self._head
        length = min(count * self.width, len(data))
        if head >= length:
            return data[head - length : head]
        return data[len(data) - (length - head) :] + data[:head]


class Series:
    """Samples and blocks of one device or process. Times are those of the History's clock."""

    __slots__ = (
        "_closes",
        "_count",
        "_marks",
        "_minutes",
        "_phase",
        "born",
        "last",
        "records",
        "rows",
        "signals",
        "tiers",
    )

    def __init__(self, signals: int, born: float, phase: float) -> None:
        self.signals = signals
        self.born = born
        self.last = -inf
        self.rows = Rows(1 + signals, SAMPLES)
        self.tiers = tuple(Rows(2 + 3 * signals, tier.rows) for tier in TIERS)
        self.records = [[-inf] * signals for _ in TIERS]
        """Highest median of each tier and signal among the blocks that are no longer kept."""
        self._phase = phase
        self._closes = [self._end(born, tier) for tier in TIERS]
        self._count = 0
        self._marks = [0, 0]
        """Numbers of samples when the last block of 15 s, and the last minute, closed."""
        self._minutes = [0, 0]

    def add(self, row: Sequence[float]) -> int:
        """Add the row (time, signals …). Returns the number of tiers, from the shortest on, of which a block
        has closed.
        """
        at = row[0]
        if at - self.last < SHORTEST_SECONDS:
            return 0
        closed = 0
        if at >= self._closes[0]:
            closed = self._close(at)
        self.rows.append(row)
        self.last = at
        self._count += 1
        return closed

    def column(self, tier: int, signal: int, kind: int = MEDIAN, count: int = SAMPLES) -> array[float]:
        """Return one number of each of the newest ``count`` closed blocks, the oldest first; NaN where it is
        unknown.
        """
        rows = self.tiers[tier]
        return rows.newest(count)[2 + 3 * signal + kind :: 2 + 3 * self.signals]

    def times(self, tier: int, count: int = SAMPLES) -> array[float]:
        return self.tiers[tier].newest(count)[:: 2 + 3 * self.signals]

    def counts(self, tier: int, count: int = SAMPLES) -> array[float]:
        return self.tiers[tier].newest(count)[1 :: 2 + 3 * self.signals]

    def running(self, tier: int) -> list[float] | None:
        """Return the row of the block that has not closed yet; None if it has no sample."""
        begin = self._closes[tier] - TIERS[tier].seconds
        width = 1 + self.signals
        flat = self.rows.newest(SAMPLES)
        fresh = sum(1 for at in flat[::width] if at >= begin)
        return [begin, *_of_samples(flat[len(flat) - fresh * width :], self.signals)] if fresh else None

    def samples(self, signal: int, count: int = SAMPLES) -> array[float]:
        return self.rows.newest(count)[1 + signal :: 1 + self.signals]

    def sample_times(self, count: int = SAMPLES) -> array[float]:
        return self.rows.newest(count)[:: 1 + self.signals]

    def restore(self, blocks: Iterable[Sequence[float]], records: Sequence[Sequence[float]]) -> None:
        for block in blocks:
            self.tiers[QUARTER].append(block)
        self.records = [list(record) for record in records]

    def _end(self, at: float, tier: Tier) -> float:
        return (floor((at - self._phase) / tier.seconds) + 1) * tier.seconds + self._phase

    def _close(self, at: float) -> int:
        closed = 0
        for place, tier in enumerate(TIERS):
            if at < self._closes[place]:
                break
            begin = self._closes[place] - tier.seconds
            if place <= MINUTE:
                fresh, self._marks[place] = self._count - self._marks[place], self._count
                summary = _of_samples(self.rows.newest(fresh), self.signals) if fresh else None
            else:
                fresh, self._minutes[place - 2] = self._minutes[place - 2], 0
                summary = _of_blocks(self.tiers[MINUTE].newest(fresh), self.signals) if fresh else None
            if summary is not None:
                self._keep(place, [begin, *summary])
                if place == MINUTE:
                    self._minutes[0] += 1
                    self._minutes[1] += 1
            self._closes[place] = self._end(at, tier)
            closed = place + 1
        return closed

    def _keep(self, place: int, row: Sequence[float]) -> None:
        gone = self.tiers[place].append(row)
        if gone is not None:
            record = self.records[place]
            for signal, median in enumerate(gone[2 + MEDIAN :: 3]):
                if median > record[signal]:
                    record[signal] = median


def _of_samples(flat: array[float], signals: int) -> list[float]:
    width = 1 + signals
    summary = [len(flat) / width]
    for signal in range(1, width):
        column = _ordered(flat[signal::width])
        summary += (column[0], _middle(column), column[-1]) if column else (nan, nan, nan)
    return summary


def _of_blocks(flat: array[float], signals: int) -> list[float]:
    width = 2 + 3 * signals
    summary = [sum(flat[1::width])]
    for first in range(2, width, 3):
        medians = _ordered(flat[first + MEDIAN :: width])
        if medians:
            lows, highs = flat[first + MIN :: width], flat[first + MAX :: width]
            summary += (min(_finite(lows)), _middle(medians), max(_finite(highs)))
        else:
            summary += (nan, nan, nan)
    return summary


def _ordered(values: array[float]) -> list[float]:
    total = sum(values)
    return sorted(values if total == total else _finite(values))


def _finite(values: Iterable[float]) -> Iterator[float]:
    return (value for value in values if value == value)


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def highest(values: Iterable[float]) -> float:
    return max(_finite(values), default=-inf)
