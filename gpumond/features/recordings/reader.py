"""Reading of logs: their lines, from a file or standard input, optionally gzip, in UTF-8 or UTF-16; their rows, and the
values in the cells.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import lru_cache
from math import isfinite
from typing import BinaryIO, NamedTuple, TypeVar, cast

from gpumond.facts.errors import ConfigError
from gpumond.facts.messages import printable_text
from gpumond.facts.units import GIB, MIB, plural
from gpumond.host.files import unreadable_text

MAX_LINE_CHARACTERS = 16 * 1024**2
GZIP_MAGIC = b"\x1f\x8b"


class LogLines:
    """The lines of a log, read once. ``number`` is the number of the current line, from 1.

    A last line without a newline may be incomplete: ``is_complete`` is False for it.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self.name = name
        self.number = 0
        self.is_complete = True
        self.is_truncated = False
        self._peeked: list[str] = []
        self.close = stream.close
        buffered = _buffered(stream)
        if buffered.peek(2)[:2] == GZIP_MAGIC:
            buffered = _buffered(cast("BinaryIO", gzip.GzipFile(fileobj=buffered)))
        self._buffered = buffered
        self._text: io.TextIOWrapper | None = None

    def first_line(self) -> str:
        """Return the first line that is not blank without consuming it; empty without one."""
        for line in self._peeked:
            if line.strip():
                return line
        while line := self._read():
            self._peeked.append(line)
            if line.strip() or len(self._peeked) > 1000:
                return line.strip("\n")
        return ""

    def __iter__(self) -> Iterator[str]:
        """Yield every line that is not blank, without its newline."""
        while line := (self._peeked.pop(0) if self._peeked else self._read()):
            self.number += 1
            self.is_complete = line.endswith("\n")
            if not self.is_complete and len(line) >= MAX_LINE_CHARACTERS:
                raise ConfigError(
                    f"{self.name}, line {self.number}: longer than {MAX_LINE_CHARACTERS} characters; check that the "
                    "file is a log"
                )
            if line := line.strip("\r\n\0 "):
                yield line

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Yield the number and text of every line that is complete and not blank."""
        return ((self.number, line) for line in self if self.is_complete)

    def remaining_text(self, max_characters: int) -> str:
        """Return the unread rest. Raises ConfigError if it is longer than ``max_characters``."""
        peeked, self._peeked = "".join(self._peeked), []
        text = peeked + self._read(max_characters + 1)
        if len(text) > max_characters:
            raise ConfigError(
                f"{self.name}: more than {max_characters // 1024**2} MiB in one document; query a longer step or fewer "
                "series"
            )
        return text

    def _read(self, max_characters: int | None = None) -> str:
        try:
            if self._text is None:
                self._text = io.TextIOWrapper(self._buffered, encoding=self._encoding(), errors="replace", newline=None)
            if max_characters is None:
                return self._text.readline(MAX_LINE_CHARACTERS)
            return self._text.read(max_characters)
        except EOFError:
            self.is_truncated = True
            return ""
        except (OSError, zlib.error) as error:
            raise ConfigError(f"{self.name}, line {self.number + 1}: can't be read: {error}") from None

    def _encoding(self) -> str:
        first_bytes = self._buffered.peek(3)[:3]
        return "utf-16" if first_bytes[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def open_lines(path: str) -> LogLines:
    """Open a log; ``-`` is standard input. Raises ConfigError."""
    if path == "-":
        return LogLines("standard input", sys.stdin.buffer)
    try:
        return LogLines(path, open(path, "rb"))
    except OSError as error:
        expected = "a log of memory use; `gpumond record --out FILE` writes one"
        raise ConfigError(unreadable_text(path, error, expected)) from None


def _buffered(stream: BinaryIO) -> io.BufferedReader:
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", stream))


MAX_MALFORMED_RATIO = 0.1
MAX_AMOUNT_DIGITS = 16


sanitize_name = lru_cache(maxsize=4096)(printable_text)


class LogRow(NamedTuple):
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
        self._first_malformed = self._first_malformed or f"line {line}: {printable_text(why)}"
        if self.malformed >= 100 and self.rows < self.malformed:
            self.check()

    def note(self, kind: str, text: str) -> None:
        """Add a message, each text once."""
        self._notes.setdefault(kind, text)

    def check(self) -> None:
        """Raise ConfigError if too many lines are malformed, or if none is usable."""
        if self.malformed > MAX_MALFORMED_RATIO * (self.rows + self.malformed):
            raise ConfigError(
                f"{self.name}: {self.malformed} of {self.rows + self.malformed} lines are malformed, more than a tenth;"
                f" the first is {self._first_malformed}"
            )
        if not self.rows:
            raise ConfigError(f"{self.name}: the log contains no readings, only a header")

    def __iter__(self) -> Iterator[str]:
        if self.malformed:
            yield f"ignored: {plural(self.malformed, 'malformed line')}; the first is {self._first_malformed}"
        if self.duplicates:
            yield f"ignored: {plural(self.duplicates, 'line')} with a second reading of the same time"
        if self.strays:
            yield f"ignored: {plural(self.strays, 'line')} far out of order in time"
        yield from self._notes.values()


class RepetitionClock:
    """Seconds since the start of a log without times, from the number of repetitions of the list of devices."""

    def __init__(self, interval_seconds: float | None) -> None:
        self._interval_seconds = interval_seconds or 1.0
        self._listed: set[tuple[object, int | None]] = set()
        self._last_index = -1
        self._rounds = 0

    def at(self, device: object, pid: int | None, index: int = 0) -> float:
        """Return the time of a reading, which begins a round if it is listed already, or if the index decreases."""
        if index < self._last_index or (device, pid) in self._listed:
            self._rounds += 1
            self._listed.clear()
        self._last_index = index
        self._listed.add((device, pid))
        return self._rounds * self._interval_seconds


T = TypeVar("T")


def parse_rows(
    numbered: Iterable[tuple[int, T]], parse: Callable[[int, T], LogRow | None], remarks: Remarks
) -> Iterator[LogRow]:
    """Yield the rows of numbered lines. ``parse`` returns None for a line without a reading, and raises ValueError or
    IndexError for a malformed one, which is skipped."""
    for number, line in numbered:
        try:
            row = parse(number, line)
        except (ValueError, IndexError) as error:
            remarks.skip(number, "too few cells" if isinstance(error, IndexError) else str(error))
            continue
        if row is not None:
            remarks.rows += 1
            yield row


UNIT_BYTES = {"b": 1, "bytes": 1, "kib": 1024, "kb": 1024, "mib": MIB, "mb": MIB, "gib": GIB, "gb": GIB}
"""Bytes of each unit. MB and GB are MiB and GiB, because the programs that write logs divide by powers of 1024."""
UNKNOWN_TEXTS = ("", "-", "na", "n/a", "nan", "null", "none", "err!")


def parse_amount(text: str, unit_bytes: float = 1) -> int | None:
    """Parse a number of bytes, or of ``unit_bytes``, or with a unit; None if it is unknown. Raises ValueError."""
    if text.isdigit() and len(text) < MAX_AMOUNT_DIGITS:
        return int(int(text) * unit_bytes)
    if text.lower() in UNKNOWN_TEXTS or text[0] == "[":
        return None
    number, _, unit = text.partition(" ")
    try:
        value = float(number) * (UNIT_BYTES[unit.lower()] if unit else unit_bytes)
    except (ValueError, KeyError):
        value = -1.0
    if not 0 <= value < 2**53:
        raise ValueError(f"{text[:40]!r} isn't an amount of memory")
    return int(value)


def used_bytes_of(used: int | None, size: int | None, free: int | None, reserved: int | None) -> int | None:
    """Return the used bytes, if necessary from the others."""
    return used if used is not None or size is None or free is None else max(0, size - free - (reserved or 0))


def parse_ratio(text: str, is_percent: bool = True) -> float | None:
    """Parse a utilization in percent, or from 0 to 1; None if it is unknown."""
    try:
        value = float(text.removesuffix("%")) / (100 if is_percent or text.endswith("%") else 1)
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None


def parse_pid(text: str) -> int:
    """Parse a pid; empty for the whole device. Raises ValueError."""
    if not text.isdecimal() or len(text) > 10 or not int(text):
        raise ValueError(f"pid {text[:40]!r}: expected a number, or an empty cell for the whole device")
    return int(text)


_MINUTE_CHARACTERS = 16
_SECONDS_AND_ZONE = re.compile(r"([\d.,]+)\s*(?:(Z|z|UTC)|([+-])(\d\d):?(\d\d)?)?")
_MAX_SECONDS = 1e11
"""The year 5138. Larger numbers are milli-, micro- or nanoseconds."""


def parse_time(text: str) -> float:
    """Parse ``2024/05/01 12:00:00.123``, ISO 8601 or a number of seconds. Raises ValueError with the remedy."""
    if text[4:5] not in ("/", "-") or text[:1] == "-":
        return _parse_unix_time(text)
    try:
        match = _SECONDS_AND_ZONE.fullmatch(text, _MINUTE_CHARACTERS + 1)
        if match is None or text[_MINUTE_CHARACTERS] != ":":
            raise ValueError
        seconds = float(match[1].replace(",", "."))
        if not 0 <= seconds < 61:
            raise ValueError
        at = _minute_start(text[:_MINUTE_CHARACTERS]) + seconds
        if match[3]:
            offset = 60 * int(match[4]) + int(match[5] or 0)
            at -= 60 * (offset if match[3] == "+" else -offset)
        return at
    except (ValueError, IndexError):
        raise ValueError(f"{text[:40]!r} isn't a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds") from None


def time_text(at: float) -> str:
    """Format a time in UTC; as seconds if the log has no dates."""
    if at < 1e8:
        return f"{at:.0f} s"
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@lru_cache(maxsize=4096)
def _minute_start(text: str) -> float:
    year, month, day = int(text[:4]), int(text[5:7]), int(text[8:10])
    if text[7] not in "/-" or text[10] not in " T" or text[13] != ":":
        raise ValueError
    return datetime(year, month, day, int(text[11:13]), int(text[14:16]), tzinfo=timezone.utc).timestamp()


def _parse_unix_time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{text[:40]!r} isn't a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds")
    scale = 1.0
    while value / scale > _MAX_SECONDS:
        scale *= 1000
    return value if scale == 1 else round(value / scale, 6)
