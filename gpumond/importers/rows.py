"""Readings of one device or process at one time, and remarks about ignored lines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gpumond.errors import ConfigError
from gpumond.protocol.messages import clean

MAX_MALFORMED_SHARE = 0.1
MOST_DIGITS = 16
"""Maximum value that is accepted as an amount of memory."""


label = lru_cache(maxsize=4096)(clean)
"""A name from a log, sanitised for output."""


class Row(NamedTuple):
    """One reading. ``pid`` is None for the whole device; ``at`` is Unix time, or seconds since the log's start.

    Unknown values are None. ``gpu`` is the device's index.
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
    """Messages about ignored parts of a log."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.malformed = 0
        self.duplicates = 0
        self.strays = 0
        self._first_malformed = ""
        self._notes: dict[str, str] = {}

    def skip(self, line: int, why: str) -> None:
        """Count an unusable line. Raises ConfigError if the log does not have the expected format."""
        self.malformed += 1
        self._first_malformed = self._first_malformed or f"line {line}: {clean(why)}"
        if self.malformed >= 100 and self.rows < self.malformed:
            self.check()

    def note(self, kind: str, text: str) -> None:
        """Add a message, each text once."""
        self._notes.setdefault(kind, text)

    def check(self) -> None:
        """Raise ConfigError if too many lines are malformed, or if none is usable."""
        if self.malformed > MAX_MALFORMED_SHARE * (self.rows + self.malformed):
            raise ConfigError(
                f"{self.name}: {self.malformed} of {self.rows + self.malformed} lines are malformed, more than a tenth;"
                f" the first is {self._first_malformed}"
            )
        if not self.rows:
            raise ConfigError(f"{self.name}: the log contains no readings, only a header")

    def __iter__(self) -> Iterator[str]:
        if self.malformed:
            yield f"{self.malformed} malformed lines are ignored; the first is {self._first_malformed}"
        if self.duplicates:
            yield f"{self.duplicates} lines repeat a reading of the same time; they are ignored"
        if self.strays:
            yield f"{self.strays} lines are far out of order in time; they are ignored"
        yield from self._notes.values()


def pid_of(text: str) -> int:
    """Parse a pid; empty for the whole device. Raises ValueError."""
    if not text.isdecimal() or len(text) > 10 or not int(text):
        raise ValueError(f"pid {text[:40]!r}: expected a number, or an empty cell for the whole device")
    return int(text)
