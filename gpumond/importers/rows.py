"""Readings of one device or process at one time, timestamps, and remarks about ignored lines.

A time without a zone is taken as UTC on every machine, so that the result depends on the file only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import lru_cache
from math import isfinite
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


_MINUTE_LENGTH = 16
_ZONED = re.compile(r"([\d.,]+)\s*(?:(Z|z|UTC)|([+-])(\d\d):?(\d\d)?)?")
_MILLISECONDS = 1e11
"""Larger numbers are milli-, micro- or nanoseconds; as seconds this is the year 5138."""


def moment(text: str) -> float:
    """Parse ``2024/05/01 12:00:00.123``, ISO 8601 or a number of seconds. Raises ValueError with the remedy."""
    if text[4:5] not in ("/", "-") or text[:1] == "-":
        return _number(text)
    try:
        match = _ZONED.fullmatch(text, _MINUTE_LENGTH + 1)
        if match is None or text[_MINUTE_LENGTH] != ":":
            raise ValueError
        seconds = float(match[1].replace(",", "."))
        if not 0 <= seconds < 61:
            raise ValueError
        at = _minute(text[:_MINUTE_LENGTH]) + seconds
        if match[3]:
            offset = 60 * int(match[4]) + int(match[5] or 0)
            at -= 60 * (offset if match[3] == "+" else -offset)
        return at
    except (ValueError, IndexError):
        raise ValueError(
            f"{text[:40]!r} is not a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds"
        ) from None


def day_and_time(at: float) -> str:
    """Format a time in UTC; as seconds if the log has no dates."""
    if at < 1e8:
        return f"{at:.0f} s"
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@lru_cache(maxsize=4096)
def _minute(text: str) -> float:
    year, month, day = int(text[:4]), int(text[5:7]), int(text[8:10])
    if text[7] not in "/-" or text[10] not in " T" or text[13] != ":":
        raise ValueError
    return datetime(year, month, day, int(text[11:13]), int(text[14:16]), tzinfo=timezone.utc).timestamp()


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{text[:40]!r} is not a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds")
    scale = 1.0
    while value / scale > _MILLISECONDS:
        scale *= 1000
    return value if scale == 1 else round(value / scale, 6)
