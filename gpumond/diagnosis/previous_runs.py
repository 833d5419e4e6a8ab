"""Earlier memory use: the highest amounts that a program's previous runs reached and held, and returned growth. No I/O.

Growth below such an amount is a cache that fills again, not a leak. A program is known by its workload or command and
its user. The records are a few numbers for each, and the store keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from gpumond.facts.units import MIB

MAX_PROGRAMS = 1000
HELD_MINUTES = 15
HELD_BYTES = 64 * MIB
HELD_RATIO = 0.1
"""A level is held while a quarter of an hour changes by at most these bytes, or by this share of what would have grown
in it at the mean rate of the process's lifetime.
"""
RETURNED_RATIO = 0.5
"""Share of a growth whose return makes it a tooth."""
TOOTH_BYTES, TOOTH_SECONDS = 256 * MIB, 600.0
"""Minimum height and duration of a tooth: a shorter one is not mistaken for a leak."""
MAX_JUMP_RATIO = 0.25
"""Maximum rise of one minute, as a share of a tooth's height: more is load that comes and goes."""
LOW_RATIO = 0.05
"""A tooth begins where the level was last at most this share of its height above the lowest."""
TOLERANCE_RATIO, TOLERANCE_BYTES = 1.1, 256 * MIB
"""Growth is below a known level up to this multiple of it, and these bytes."""


def _repeated_growth_limit(level: float) -> float:
    return TOLERANCE_RATIO * level + TOLERANCE_BYTES if level else 0.0


ProgramKey = tuple[str, int | None]
"""Workload or command, and user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierUse:
    """``held_bytes``: highest level that a process held; ``returned_bytes``: highest level from which it returned
    growth. ``seen_at``: Unix time of the last change.
    """

    name: str
    uid: int | None
    seen_at: float
    held_bytes: float = 0.0
    returned_bytes: float = 0.0

    @property
    def repeated_bytes(self) -> float:
        """Bytes up to which growth isn't a leak."""
        return _repeated_growth_limit(max(self.held_bytes, self.returned_bytes))


class EarlierUses:
    """The past of each program, the newest last."""

    def __init__(self) -> None:
        self._uses: dict[ProgramKey, EarlierUse] = {}

    def repeated_bytes(self, program: ProgramKey) -> float:
        use = self._uses.get(program)
        return use.repeated_bytes if use is not None else 0.0

    def record(self, program: ProgramKey, at: float, held: float = 0.0, returned: float = 0.0) -> None:
        """Record a level that was held or returned."""
        if not program[0]:
            return
        before = self._uses.pop(program, None) or EarlierUse(name=program[0], uid=program[1], seen_at=at)
        self._uses[program] = replace(
            before,
            seen_at=at,
            held_bytes=max(before.held_bytes, held),
            returned_bytes=max(before.returned_bytes, returned),
        )
        if len(self._uses) > MAX_PROGRAMS:
            del self._uses[next(iter(self._uses))]

    def records(self) -> tuple[EarlierUse, ...]:
        return tuple(self._uses.values())

    def restore(self, earlier_uses: Iterable[EarlierUse]) -> None:
        """Add the records of earlier daemons, which those of this one follow."""
        restored = {(use.name, use.uid): use for use in sorted(earlier_uses, key=lambda use: use.seen_at)}
        self._uses = {**restored, **self._uses}


class SawtoothLevels:
    """The present tooth of a curve, the level that it has held in this process, and the highest from which a tooth, and
    a long one, was returned; 0 while there is none.
    """

    def __init__(self) -> None:
        self.sustained_bytes = self.long_tooth_bytes = self.tooth_bytes = 0.0
        self._begin: tuple[float, float] | None = None
        self._low = self._high = self._low_at = self._high_at = self._last_level = self._max_rise = 0.0

    @property
    def repeated_bytes(self) -> float:
        """Bytes up to which growth repeats a long tooth of this process."""
        return _repeated_growth_limit(self.long_tooth_bytes)

    @property
    def any_repeated_bytes(self) -> float:
        """Bytes up to which growth repeats any tooth of this process."""
        return _repeated_growth_limit(self.tooth_bytes)

    def add(self, at: float, medians: Sequence[float], is_leaking: bool) -> None:
        """Add a minute. ``medians``: those of the last minutes; ``is_leaking``: a leak is active."""
        level = medians[-1]
        if level != level:
            return
        if self._begin is None:
            self._begin = (at, level)
            self._restart(at, level)
        self._max_rise, self._last_level = max(self._max_rise, level - self._last_level), level
        if level > self._high:
            self._high, self._high_at = level, at
        height = self._high - self._low
        if height >= TOOTH_BYTES and level < self._high - RETURNED_RATIO * height:
            self.tooth_bytes = max(self.tooth_bytes, self._high)
            if self._high_at - self._low_at >= TOOTH_SECONDS and self._max_rise <= MAX_JUMP_RATIO * height:
                self.long_tooth_bytes = max(self.long_tooth_bytes, self._high)
            self._restart(at, level)
        elif level <= self._low + LOW_RATIO * height:
            self._low, self._low_at, self._max_rise = min(self._low, level), at, 0.0
        recent = [value for value in medians[-HELD_MINUTES:] if value == value]
        if len(recent) == HELD_MINUTES and not is_leaking:
            third = HELD_MINUTES // 3
            change = abs(median(recent[-third:]) - median(recent[:third]))
            mean = max(0.0, level - self._begin[1]) / max(1.0, at - self._begin[0])
            if change <= max(HELD_BYTES, HELD_RATIO * mean * 60 * HELD_MINUTES):
                self.sustained_bytes = max(self.sustained_bytes, median(recent))

    def _restart(self, at: float, level: float) -> None:
        self._low = self._high = self._last_level = level
        self._low_at = self._high_at = at
        self._max_rise = 0.0


FLOOR_BLOCKS = 16
"""Number of blocks of 15 minutes that have one floor, their lower quartile: four hours."""
MAX_FLOORS, MIN_FLOORS, DAY_FLOORS = 24, 8, 6
MIN_FLOORS_RISE_BYTES = 96 * MIB
EVEN_RISE_LIMITS = (0.25, 3.0)
"""Limits of each rise, as shares of their median."""
MIN_LAST_RISE_RATIO = 0.75
"""Minimum rise in the last half, as a share of that in the first."""


class RunFloors:
    """Floors of a run, one for four hours: they show growth that is slower than the changes of load."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []
        self._quarters: list[float] = []

    def add(self, at: float, level: float) -> None:
        """Add a quarter of an hour."""
        if level == level:
            self._quarters.append(level)
        if len(self._quarters) == FLOOR_BLOCKS:
            self.values.append((at, sorted(self._quarters)[FLOOR_BLOCKS // 4]))
            del self.values[:-MAX_FLOORS]
            self._quarters = []

    def rising_floors(self) -> Sequence[tuple[float, float]]:
        """Return the floors that rise evenly, one after another or from day to day; empty if they do not."""
        newest = self.values[-MIN_FLOORS:]
        if len(newest) == MIN_FLOORS and _is_even([b[1] - a[1] for a, b in pairwise(newest)], newest):
            return newest
        days = self.values[-2 * DAY_FLOORS :]
        half = len(days) // 2
        if half == DAY_FLOORS and _is_even([b[1] - a[1] for a, b in zip(days, days[half:], strict=False)], days):
            return days
        return ()


def _is_even(rises: Sequence[float], floors: Sequence[tuple[float, float]]) -> bool:
    middle, half = median(rises), len(rises) // 2
    if floors[-1][1] - floors[0][1] < MIN_FLOORS_RISE_BYTES or middle <= 0:
        return False
    if not all(EVEN_RISE_LIMITS[0] * middle <= rise <= EVEN_RISE_LIMITS[1] * middle for rise in rises):
        return False
    return sum(rises[-half:]) >= MIN_LAST_RISE_RATIO * sum(rises[:half])
