"""Logs of ``nvidia-smi --query-gpu=… --format=csv[,nounits] -l N``, and of ``--query-compute-apps``.

Columns may be in any order, units in the header or in the cells. Headers may be repeated, and a log may contain
several devices. The default table of ``nvidia-smi``, repeated (``-l N``), has devices and, where listed, their
processes. ``dmon`` reads the tables of ``dmon`` and ``pmon``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain, islice
from typing import NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings import dmon
from gpumond.features.recordings.reader import (
    UNIT_BYTES,
    LogLines,
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

REMEDY = "record with: nvidia-smi --query-gpu=timestamp,uuid,memory.used,memory.total --format=csv -l 1"
FIELD_OF_COLUMN = {
    "timestamp": "time",
    "index": "index",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "pci.bus_id": "bus",
    "gpu_bus_id": "bus",
    "gpu.pci.bus_id": "bus",
    "serial": "serial",
    "gpu_serial": "serial",
    "name": "name",
    "gpu_name": "name",
    "pid": "pid",
    "process_name": "program",
    "memory.used": "used",
    "used_memory": "used",
    "used_gpu_memory": "used",
    "memory.total": "size",
    "memory.free": "free",
    "memory.reserved": "reserved",
    "utilization.gpu": "utilization",
}
IDENTITY_FIELDS = ("uuid", "bus", "serial", "index")
SAME_MOMENT_SECONDS = 0.02
MAX_LINES_BEFORE_TABLE = 20
"""Number of first lines among which a table may begin: a script writes a line of its own before each."""
_ESCAPE_CHARACTER = "\x1b"
_NUMBER = re.compile(r"(^|,)\s*[-+.]?\d")
_HEADER_CELL = re.compile(r"([a-z][\w.]*)(?: \[(.*)\])?")
_MESSAGE = re.compile(r"(Unable to|Failed to|NVIDIA-SMI|No devices|No running|Unknown Error|GPU is lost|Terminated)")
_QUERY_OUTPUT = re.compile(r"\|[ =]|={10,}NVSMI")


class LogColumn(NamedTuple):
    """``unit_bytes``: the unit of an amount without one in its cell."""

    position: int
    unit_bytes: float = MIB


Columns = dict[str, LogColumn]


def parse_header(line: str) -> Columns | None:
    """Return the columns that this line names; None if it is not a header."""
    columns: Columns = {}
    for position, cell in enumerate(line.split(",")):
        match = _HEADER_CELL.fullmatch(cell.strip())
        if match is None:
            return None
        if match[1] in FIELD_OF_COLUMN:
            unit_bytes = UNIT_BYTES.get((match[2] or "mib").lower(), 1)
            columns.setdefault(FIELD_OF_COLUMN[match[1]], LogColumn(position, unit_bytes))
    return columns or None


def rows(lines: LogLines, remarks: Remarks, interval_seconds: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a log. ``interval_seconds``: the N of ``-l N``, without timestamps. Raises ConfigError."""
    first_line, numbered = lines.first_line().strip(), lines.numbered()
    if _is_table(first_line):
        return _table_rows(numbered, remarks, interval_seconds)
    if dmon.detect(first_line):
        return dmon.rows(numbered, remarks, interval_seconds)
    if _QUERY_OUTPUT.match(first_line):
        raise ConfigError(f"{lines.name}, line 1: this is the output of nvidia-smi -q, not CSV; {REMEDY}")
    parser = _RowParser(lines, remarks, interval_seconds)
    if parse_header(first_line) is None:
        peeked = list(islice(numbered, MAX_LINES_BEFORE_TABLE))
        if any(_TABLE_START.match(line) for _, line in peeked):
            return _table_rows(chain(peeked, numbered), remarks, interval_seconds)
        if _ESCAPE_CHARACTER in first_line:
            raise ConfigError(f"{lines.name}, line 1: terminal output, for example from watch; {REMEDY}")
        if "," not in first_line:
            raise ConfigError(
                f"{lines.name}, line 1: {first_line[:60]!r} isn't in a known log format (see --format); {REMEDY}"
            )
        if not _NUMBER.search(first_line):
            raise ConfigError(f"{lines.name}, line 1: none of the columns {first_line[:120]} is known; {REMEDY}")
        raise ConfigError(
            f"{lines.name}, line 1: no header; insert the names passed to --query-gpu as the first line of the log,"
            " such as timestamp, index, memory.used"
        )
    return parse_rows(numbered, parser.row, remarks)


class _RowParser:
    """Parser of rows with the columns of the last header."""

    def __init__(self, lines: LogLines, remarks: Remarks, interval_seconds: float | None) -> None:
        self._lines, self._remarks, self._interval_seconds = lines, remarks, interval_seconds
        self._columns: Columns = {}
        self._header = ""
        self._identity_field: str | None = None
        self._separator_count = 0
        self._round_clock = RepetitionClock(interval_seconds)
        self._models: dict[str, tuple[tuple[str, int | None], int]] = {}
        self._previous: tuple[float, str] | None = None

    def use_columns(self, columns: Columns) -> None:
        location = f"{self._lines.name}, line {max(1, self._lines.number)}"
        if "used" not in columns and not {"free", "size"} <= columns.keys():
            raise ConfigError(f"{location}: no column memory.used (nor memory.free and memory.total); {REMEDY}")
        if "time" not in columns and self._interval_seconds is None:
            raise ConfigError(
                f"{location}: no column timestamp; add it to --query-gpu, or pass the time between two"
                " readings with --interval, such as 5s for -l 5"
            )
        self._columns = columns
        self._identity_field = next((name for name in IDENTITY_FIELDS if name in columns), None)
        if self._identity_field is None:
            self._remarks.note(
                "identity", "no column identifies devices (uuid, pci.bus_id, index): all rows are treated as one device"
            )

    def row(self, number: int, line: str) -> LogRow | None:
        """Return the reading of a line; None for a header, which is used from now on, and for a message."""
        if line == self._header:
            return None
        try:
            return self._row(number, line)
        except (ValueError, IndexError):
            columns = parse_header(line)
            if columns is not None:
                self.use_columns(columns)
                self._header, self._separator_count = line, line.count(",")
            elif _MESSAGE.match(line):
                self._remarks.note("message", f"line {number}: nvidia-smi reported: {line[:120]}")
            else:
                raise
            return None

    def _row(self, number: int, line: str) -> LogRow:
        cells = line.split(",")
        columns = self._columns
        if not columns:
            raise ValueError("a reading before any header")
        if len(cells) - 1 != self._separator_count:
            cells = self._join_program_name(cells, columns)
        used, size, free, reserved = (self._bytes(cells, field) for field in ("used", "size", "free", "reserved"))
        name, pid, index = (self._cell(cells, field) for field in ("name", "pid", "index"))
        device = sanitize_name(
            self._device(self._cell(cells, self._identity_field) if self._identity_field else "", name, size)
        )
        process = parse_pid(pid) if "pid" in columns else None
        at = parse_time(self._cell(cells, "time")) if "time" in columns else self._round_clock.at(device, process)
        if self._identity_field is None and process is None:
            self._check_one_device(number, at, line)
        gpu = int(index) if index.isdigit() and len(index) < 5 else None
        program = name if process is None else self._cell(cells, "program")
        return LogRow(
            number,
            at,
            device,
            process,
            used_bytes_of(used, size, free, reserved),
            size,
            utilization_ratio=parse_ratio(self._cell(cells, "utilization")),
            gpu=gpu,
            name=sanitize_name(program),
        )

    def _cell(self, cells: list[str], field: str) -> str:
        column = self._columns.get(field)
        return cells[column.position].strip() if column else ""

    def _bytes(self, cells: list[str], field: str) -> int | None:
        column = self._columns.get(field)
        return parse_amount(cells[column.position].strip(), column.unit_bytes) if column else None

    def _join_program_name(self, cells: list[str], columns: Columns) -> list[str]:
        """Join cells that are parts of one program name. It may contain commas, and nvidia-smi does not quote."""
        extra = len(cells) - 1 - self._separator_count
        if extra < 0 or "program" not in columns:
            raise ValueError(f"{len(cells)} cells, expected {self._separator_count + 1}")
        index = columns["program"].position
        return [*cells[:index], ",".join(cells[index : index + extra + 1]), *cells[index + extra + 1 :]]

    def _device(self, identity: str, name: str, size: int | None) -> str:
        """Return the UUID or, without one, a label that changes when the device in a slot is replaced."""
        if self._identity_field == "uuid":
            if not identity:
                raise ValueError("the uuid is empty")
            return identity
        if self._identity_field in (None, "index"):
            identity = f"gpu{identity}"
        model = (name, size)
        last_model, swaps = self._models.get(identity, (model, 0))
        if last_model != model and size is not None:
            swaps += 1
        if size is not None or identity not in self._models:
            self._models[identity] = (model, swaps)
        return f"{identity}#{swaps + 1}" if swaps else identity

    def _check_one_device(self, number: int, at: float, line: str) -> None:
        before, self._previous = self._previous, (at, line)
        if "time" in self._columns and before and line != before[1] and 0 <= at - before[0] < SAME_MOMENT_SECONDS:
            raise ConfigError(
                f"{self._lines.name}, line {number}: two readings at one time and no column that identifies the"
                " devices; add uuid, index or pci.bus_id to --query-gpu"
            )


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_DATE = re.compile(rf"\w{{3}} ({'|'.join(MONTHS)}) +(\d{{1,2}}) (\d\d):(\d\d):(\d\d) (\d{{4}})")
_TABLE_START = re.compile(r"\| NVIDIA-SMI ")
_DEVICE_LINE = re.compile(r"\|\s+(\d{1,4})\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:\S+)\s")
_MEMORY_LINE = re.compile(r"\|[^|]*\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|\s*(?:(\d{1,2}|100)%|N/A|ERR!)")
_PROCESS_LINE = re.compile(
    r"\|\s+(\d{1,4})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?([1-9]\d{0,9})\s+[A-Z+]+\s+(\S.*?)\s+(\d{1,9})MiB\s*\|"
)


class _TableDevice(NamedTuple):
    gpu: int
    name: str
    bus: str


def _is_table(line: str) -> bool:
    """Return whether a log with this first line consists of tables."""
    return line.startswith("+--") or _TABLE_START.match(line) is not None or _DATE.match(line) is not None


def _table_rows(
    numbered: Iterator[tuple[int, str]], remarks: Remarks, interval_seconds: float | None
) -> Iterator[LogRow]:
    """Yield the rows of all tables. ``interval_seconds``: between two tables without a date. Raises ConfigError.

    The processes of a device are unknown until its table lists one, because a container hides those of others.
    Processes without an amount of memory are ignored.
    """
    at: float | None = None
    tables = 0
    device: _TableDevice | None = None
    buses: dict[int, str] = {}
    for number, line in numbered:
        if match := _DATE.search(line):
            at = _table_time(match)
        elif _TABLE_START.match(line):
            at = interval_seconds * tables if at is None and interval_seconds is not None else at
            if at is None:
                raise ConfigError(
                    f"{remarks.name}, line {number}: this table has no timestamp; pass the time between tables with"
                    " --interval, such as 5s"
                )
            table_at, at, device = at, None, None
            tables += 1
        elif not tables:
            continue
        elif match := _DEVICE_LINE.match(line):
            device = _TableDevice(int(match[1]), sanitize_name(match[2]), sanitize_name(match[3]))
            buses[device.gpu] = device.bus
        elif device is not None and (match := _MEMORY_LINE.match(line)):
            utilization = int(match[3]) / 100 if match[3] else None
            used, size = int(match[1]) * MIB, int(match[2]) * MIB
            remarks.rows += 1
            yield LogRow(
                number,
                table_at,
                device.bus,
                used_bytes=used,
                size_bytes=size,
                utilization_ratio=utilization,
                gpu=device.gpu,
                name=device.name,
            )
            device = None
        elif (match := _PROCESS_LINE.match(line)) and int(match[1]) in buses:
            index = int(match[1])
            remarks.rows += 1
            yield LogRow(
                number,
                table_at,
                buses[index],
                int(match[2]),
                int(match[4]) * MIB,
                gpu=index,
                name=sanitize_name(match[3]),
            )


def _table_time(match: re.Match[str]) -> float:
    month = MONTHS.index(match[1]) + 1
    day, hour, minute, second, year = (int(match[group]) for group in range(2, 7))
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise ConfigError(f"{match[0]!r} isn't a time: {error}") from None


FORMAT = Format("nvidia-smi", dmon.detect, snapshot_reader(rows, lists_all_processes=True))
