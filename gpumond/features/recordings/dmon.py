"""Scrolling tables: ``nvidia-smi dmon``, ``nvidia-smi pmon`` and ``dcgmi dmon``.

A line that begins with ``#`` names the columns, in any order, and is repeated; the line after it has the units. Amounts
of memory are in MiB, which the programs call MB. ``-`` and ``N/A`` are unknown values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import DAY_SECONDS, MIB
from gpumond.features.recordings.reader import (
    UNKNOWN_TEXTS,
    LogRow,
    Remarks,
    RepetitionClock,
    parse_amount,
    parse_pid,
    parse_ratio,
    parse_rows,
    parse_time,
    sanitize_name,
    used_bytes_of,
)
from gpumond.features.recordings.snapshots import Format, snapshot_reader

FIELD_OF_COLUMN: Mapping[str, str] = {
    "date": "date",
    "time": "time",
    "gpu": "device",
    "entity": "device",
    "pid": "pid",
    "command": "command",
    "fb": "used",
    "fbusd": "used",
    "fbfre": "free",
    "fbttl": "size",
    "fbrsv": "reserved",
    "sm": "utilization",
    "gputl": "utilization",
}
REMEDY = (
    "record with: nvidia-smi dmon -s um -o DT, nvidia-smi pmon -s um -o DT, or dcgmi dmon -e 203,250,252 -d 1000 and "
    "--interval 1s"
)
_SEPARATOR = re.compile(r"\s*,\s*")
_CLOCK = re.compile(r"(\d\d?):(\d\d):(\d\d(?:\.\d+)?)")
_ENTITY = re.compile(r"([A-Za-z][A-Za-z-]*) (\d+)\s+(.*)")


def detect(line: str) -> bool:
    """Return True if a log with this first line is a scrolling table."""
    return line.startswith("#") and not {"gpu", "entity"}.isdisjoint(_cells(line[1:].lower()))


def is_dcgmi(line: str) -> bool:
    return detect(line) and "entity" in _cells(line[1:].lower())


def rows(numbered: Iterable[tuple[int, str]], remarks: Remarks, interval_seconds: float | None) -> Iterator[LogRow]:
    """Yield the rows of a table. ``interval_seconds``: between two readings without a time. Raises ConfigError."""
    return parse_rows(numbered, _RowParser(remarks, interval_seconds).row, remarks)


class _RowParser:
    def __init__(self, remarks: Remarks, interval_seconds: float | None) -> None:
        self._remarks, self._interval_seconds = remarks, interval_seconds
        self._columns: dict[str, int] = {}
        self._has_entities = self._has_commas = False
        self._round_clock = RepetitionClock(interval_seconds)
        self._days = 0
        self._last_clock_seconds = 0.0

    def use_columns(self, number: int, line: str) -> None:
        """Use the columns that this line names. Raises ConfigError."""
        names = _cells(line[1:].lower())
        self._has_entities, self._has_commas = "entity" in names, "," in line
        self._columns = {}
        for position, name in enumerate(names):
            if name in FIELD_OF_COLUMN:
                self._columns.setdefault(FIELD_OF_COLUMN[name], position)
        location = f"{self._remarks.name}, line {number}"
        if "used" not in self._columns and not {"free", "size"} <= self._columns.keys():
            raise ConfigError(f"{location}: no column of used memory (fb, FBUSD); {REMEDY}")
        if "time" not in self._columns and self._interval_seconds is None:
            raise ConfigError(
                f"{location}: no column Time; record with -o DT, or pass the time between two readings with "
                "--interval, such as 1s for -d 1 (dcgmi: -d 1000)"
            )

    def row(self, number: int, line: str) -> LogRow | None:
        """Return the reading of a line, None if it has none. Raises ValueError or IndexError, and ConfigError."""
        if line.startswith("#"):
            if detect(line):
                self.use_columns(number, line)
            return None
        if self._has_entities:
            entity = _ENTITY.match(line)
            if entity is None or entity[1] != "GPU":
                self._ignore(number, line, entity is not None)
                return None
            line = f"{entity[2]} {entity[3]}"
        elif not line[0].isdigit():
            self._ignore(number, line, False)
            return None
        if not self._columns:
            raise ValueError("a reading before any header")
        cells = _SEPARATOR.split(line) if self._has_commas else line.split()
        index_text = cells[self._columns["device"]]
        if not index_text.isdecimal() or len(index_text) > 4:
            raise ValueError(f"{index_text[:40]!r}: expected the index of a device")
        index = int(index_text)
        pid_text = cells[self._columns["pid"]] if "pid" in self._columns else ""
        pid = None if pid_text.lower() in UNKNOWN_TEXTS else parse_pid(pid_text)
        used, size, free, reserved = (
            parse_amount(self._cell(cells, name), MIB) for name in ("used", "size", "free", "reserved")
        )
        name = " ".join(cells[self._columns["command"] :]) if pid is not None and "command" in self._columns else ""
        return LogRow(
            number,
            self._time(cells, index, pid),
            f"gpu{index}",
            pid,
            used_bytes_of(used, size, free, reserved),
            size,
            utilization_ratio=parse_ratio(self._cell(cells, "utilization")),
            gpu=index,
            name=sanitize_name(name),
        )

    def _ignore(self, number: int, line: str, is_entity: bool) -> None:
        if is_entity:
            self._remarks.note("entity", "lines about entities other than GPUs are ignored")
        elif not line.startswith("ID"):
            self._remarks.note("message", f"line {number}: the program reported: {sanitize_name(line[:120])}")

    def _time(self, cells: Sequence[str], index: int, pid: int | None) -> float:
        if "time" not in self._columns:
            return self._round_clock.at(index, pid, index)
        clock_text = cells[self._columns["time"]]
        if "date" in self._columns:
            date = cells[self._columns["date"]]
            if date.isdigit():
                date = f"{date[:4]}-{date[4:6]}-{date[6:]}"
            return parse_time(f"{date} {clock_text}")
        match = _CLOCK.fullmatch(clock_text)
        if match is None:
            raise ValueError(f"{clock_text[:40]!r} isn't a time; expected 12:00:00")
        seconds = 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])
        if seconds < self._last_clock_seconds - DAY_SECONDS / 2:
            self._days += 1
        self._last_clock_seconds = seconds
        return seconds + DAY_SECONDS * self._days

    def _cell(self, cells: Sequence[str], field: str) -> str:
        position = self._columns.get(field)
        return "" if position is None else cells[position]


def _cells(line: str) -> list[str]:
    return _SEPARATOR.split(line.strip()) if "," in line else line.split()


FORMAT = Format(
    "dcgm", is_dcgmi, snapshot_reader(lambda lines, remarks, interval: rows(lines.numbered(), remarks, interval))
)
