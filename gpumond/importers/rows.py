"""What a log says of one device or one process at one moment, and what was left out of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gpumond.errors import ConfigError
from gpumond.protocol.messages import clean

MAX_MALFORMED_SHARE = 0.1
MOST_DIGITS = 16
"""Of a number that can be an amount of memory."""


label = lru_cache(maxsize=4096)(clean)
"""A name from a log, safe to show."""


class Row(NamedTuple):
    """``pid`` is None for the device as a whole; ``at`` is unix time, or seconds since the log's start.

    Unknown is None. ``gpu`` is the device's index.
    """

    line: int
    at: float
    device: str
    pid: int | None = None
    used_bytes: int | None = None
    size_bytes: int | None = None
    live_bytes: int | None = None
    held_bytes: int | None = None
    utilization_ratio: float | None = None
    gpu: int | None = None
    name: str = ""


class Remarks:
    """What of a log was left out, for people."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.malformed = 0
        self.duplicates = 0
        self.strays = 0
        self._first_malformed = ""
        self._notes: dict[str, str] = {}

    def skip(self, line: int, why: str) -> None:
        """A line that says nothing usable. Raises ConfigError once it is clear that this is no such log."""
        self.malformed += 1
        self._first_malformed = self._first_malformed or f"line {line}: {clean(why)}"
        if self.malformed >= 100 and self.rows < self.malformed:
            self.check()

    def note(self, kind: str, text: str) -> None:
        """Once for each kind."""
        self._notes.setdefault(kind, text)

    def check(self) -> None:
        """Raises ConfigError if too much was malformed for the rest to be trusted, or if nothing was usable."""
        if self.malformed > MAX_MALFORMED_SHARE * (self.rows + self.malformed):
            raise ConfigError(
                f"{self.name}: {self.malformed} of {self.rows + self.malformed} lines are malformed, more than a tenth;"
                f" the first is {self._first_malformed}"
            )
        if not self.rows:
            raise ConfigError(f"{self.name}: no reading in it; a header alone is not a log yet")

    def __iter__(self) -> Iterator[str]:
        if self.malformed:
            yield f"{self.malformed} malformed lines are left out; the first is {self._first_malformed}"
        if self.duplicates:
            yield f"{self.duplicates} lines say again what was said for the same time; they are left out"
        if self.strays:
            yield f"{self.strays} lines are far out of order in time; they are left out"
        yield from self._notes.values()


def pid_of(text: str) -> int:
    """Raises ValueError."""
    if not text.isdecimal() or len(text) > 10 or not int(text):
        raise ValueError(f"pid {text[:40]!r}: expected a number, or nothing for the device as a whole")
    return int(text)
