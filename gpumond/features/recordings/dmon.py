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
    UNKNOWN,
    LogRow,
    Remarks,
    Rounds,
    label,
    parse_amount,
    parse_pid,
    parse_ratio,
    parse_rows,
    parse_time,
    used_of,
)
from gpumond.features.recordings.snapshots import Format, from_rows

FIELDS: Mapping[str, str] = {
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
_COMMA = re.compile(r"\s*,\s*")
_CLOCK = re.compile(r"(\d\d?):(\d\d):(\d\d(?:\.\d+)?)")
_ENTITY = re.compile(r"([A-Za-z][A-Za-z-]*) (\d+)\s+(.*)")


def detect(line: str) -> bool:
    """Return True if a log with this first line is a scrolling table."""
    return line.startswith("#") and not {"gpu", "entity"}.isdisjoint(_cells(line[1:].lower()))


def is_dcgmi(line: str) -> bool:
    return detect(line) and "entity" in _cells(line[1:].lower())


def rows(numbered: Iterable[tuple[int, str]], remarks: Remarks, interval: float | None) -> Iterator[LogRow]:
    """Yield the rows of a table. ``interval``: seconds between two readings without a time. Raises ConfigError."""
    return parse_rows(numbered, _Table(remarks, interval).row, remarks)


class _Table:
    def __init__(self, remarks: Remarks, interval: float | None) -> None:
        self._remarks, self._interval = remarks, interval
        self._columns: dict[str, int] = {}
        self._entities = self._comma = False
        self._rounds = Rounds(interval)
        self._days = 0
        self._clock = 0.0

    def use(self, number: int, line: str) -> None:
        """Use the columns that this line names. Raises ConfigError."""
        names = _cells(line[1:].lower())
        self._entities, self._comma = "entity" in names, "," in line
        self._columns = {}
        for at, name in enumerate(names):
            if name in FIELDS:
                self._columns.setdefault(FIELDS[name], at)
        where = f"{self._remarks.name}, line {number}"
        if "used" not in self._columns and not {"free", "size"} <= self._columns.keys():
            raise ConfigError(f"{where}: no column of used memory (fb, FBUSD); {REMEDY}")
        if "time" not in self._columns and self._interval is None:
            raise ConfigError(
                f"{where}: no column Time; record with -o DT, or pass the time between two readings with "
                "--interval, such as 1s for -d 1 (dcgmi: -d 1000)"
            )

    def row(self, number: int, line: str) -> LogRow | None:
        """Return the reading of a line, None if it has none. Raises ValueError or IndexError, and ConfigError."""
        if line.startswith("#"):
            if detect(line):
                self.use(number, line)
            return None
        if self._entities:
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
        cells = _COMMA.split(line) if self._comma else line.split()
        number_of_device = cells[self._columns["device"]]
        if not number_of_device.isdecimal() or len(number_of_device) > 4:
            raise ValueError(f"{number_of_device[:40]!r}: expected the index of a device")
        index = int(number_of_device)
        text = cells[self._columns["pid"]] if "pid" in self._columns else ""
        pid = None if text.lower() in UNKNOWN else parse_pid(text)
        used, size, *rest = (
            parse_amount(self._cell(cells, name), MIB) for name in ("used", "size", "free", "reserved")
        )
        at, load = self._time(cells, index, pid), parse_ratio(self._cell(cells, "utilization"))
        name = " ".join(cells[self._columns["command"] :]) if pid is not None and "command" in self._columns else ""
        used = used_of(used, size, *rest)
        return LogRow(number, at, f"gpu{index}", pid, used, size, None, None, load, index, label(name))

    def _ignore(self, number: int, line: str, is_entity: bool) -> None:
        if is_entity:
            self._remarks.note("entity", "lines about entities other than GPUs are ignored")
        elif not line.startswith("ID"):
            self._remarks.note("message", f"line {number}: the program reported: {label(line[:120])}")

    def _time(self, cells: Sequence[str], index: int, pid: int | None) -> float:
        if "time" not in self._columns:
            return self._rounds.at(index, pid, index)
        clock = cells[self._columns["time"]]
        if "date" in self._columns:
            day = cells[self._columns["date"]]
            return parse_time(f"{day[:4]}-{day[4:6]}-{day[6:]} {clock}" if day.isdigit() else f"{day} {clock}")
        match = _CLOCK.fullmatch(clock)
        if match is None:
            raise ValueError(f"{clock[:40]!r} isn't a time; expected 12:00:00")
        at = 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])
        if at < self._clock - DAY_SECONDS / 2:
            self._days += 1
        self._clock = at
        return at + DAY_SECONDS * self._days

    def _cell(self, cells: Sequence[str], field: str) -> str:
        at = self._columns.get(field)
        return "" if at is None else cells[at]


def _cells(line: str) -> list[str]:
    return _COMMA.split(line.strip()) if "," in line else line.split()


FORMAT = Format("dcgm", is_dcgmi, from_rows(lambda lines, remarks, interval: rows(lines.numbered(), remarks, interval)))
