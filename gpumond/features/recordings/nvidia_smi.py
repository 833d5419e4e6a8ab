"""Logs of ``nvidia-smi --query-gpu=… --format=csv[,noheader,nounits] -l N``, and of ``--query-compute-apps``.

Columns may be in any order, units in the header or in the cells. Headers may be repeated, and a log may contain
several devices. The default table of ``nvidia-smi``, repeated (``-l N``), has devices and, where listed, their
processes. ``scrolling`` reads the tables of ``dmon`` and ``pmon``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain, islice
from typing import NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings import scrolling
from gpumond.features.recordings.reader import (
    UNITS,
    Lines,
    Remarks,
    Rounds,
    Row,
    amount,
    label,
    moment,
    parsed,
    pid_of,
    ratio,
    used_of,
)
from gpumond.features.recordings.snapshots import Format, from_rows

REMEDY = "record with: nvidia-smi --query-gpu=timestamp,uuid,memory.used,memory.total --format=csv -l 1"
FIELDS = {
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
IDENTITIES = ("uuid", "bus", "serial", "index")
SAME_MOMENT_SECONDS = 0.02
TO_INFER_FROM = 5000
BEFORE_TABLE = 20
"""Number of first lines among which a table may begin: a script writes a line of its own before each."""
_ESCAPE = "\x1b"
_NUMBER = re.compile(r"(^|,)\s*[-+.]?\d")
_CELL = re.compile(r"([a-z][\w.]*)(?: \[(.*)\])?")
_MESSAGE = re.compile(r"(Unable to|Failed to|NVIDIA-SMI|No devices|No running|Unknown Error|GPU is lost|Terminated)")
_OTHER = re.compile(r"\|[ =]|={10,}NVSMI")


class LogColumn(NamedTuple):
    """``factor``: bytes in one unit of an amount without a unit in its cell."""

    at: int
    factor: float = MIB


Columns = dict[str, LogColumn]


def header(line: str) -> Columns | None:
    """Return the columns that this line names; None if it is not a header."""
    columns: Columns = {}
    for at, cell in enumerate(line.split(",")):
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            return None
        if match[1] in FIELDS:
            columns.setdefault(FIELDS[match[1]], LogColumn(at, UNITS.get((match[2] or "mib").lower(), 1)))
    return columns or None


def rows(lines: Lines, remarks: Remarks, interval: float | None = None) -> Iterator[Row]:
    """Yield the rows of a log. ``interval``: the N of ``-l N``, without timestamps. Raises ConfigError."""
    first, numbered = lines.first().strip(), lines.numbered()
    if _is_table(first):
        return _table_rows(numbered, remarks, interval)
    if scrolling.starts(first):
        return scrolling.rows(numbered, remarks, interval)
    if _OTHER.match(first):
        raise ConfigError(f"{lines.name}, line 1: this is the output of nvidia-smi -q, not CSV; {REMEDY}")
    log = _Log(lines, remarks, interval)
    if header(first) is None:
        peeked = list(islice(numbered, TO_INFER_FROM))
        if any(_START.match(line) for _, line in peeked[:BEFORE_TABLE]):
            return _table_rows(chain(peeked, numbered), remarks, interval)
        if _ESCAPE in first:
            raise ConfigError(f"{lines.name}, line 1: terminal output, for example from watch; {REMEDY}")
        if "," not in first:
            raise ConfigError(f"{lines.name}, line 1: {first[:60]!r} isn't a line of an nvidia-smi log; {REMEDY}")
        if not _NUMBER.search(first):
            raise ConfigError(f"{lines.name}, line 1: none of the columns {first[:120]} is known; {REMEDY}")
        log.use(infer(lines.name, [[cell.strip() for cell in line.split(",")] for _, line in peeked]))
        numbered = chain(peeked, numbered)
    return parsed(numbered, log.row, remarks)


class _Log:
    """Parser of rows with the columns of the last header."""

    def __init__(self, lines: Lines, remarks: Remarks, interval: float | None) -> None:
        self._lines, self._remarks, self._interval = lines, remarks, interval
        self._columns: Columns = {}
        self._header = ""
        self._identity: str | None = None
        self._width = 0
        self._rounds = Rounds(interval)
        self._models: dict[str, tuple[tuple[str, int | None], int]] = {}
        self._previous: tuple[float, str] | None = None

    def use(self, columns: Columns) -> None:
        where = f"{self._lines.name}, line {max(1, self._lines.number)}"
        if "used" not in columns and not {"free", "size"} <= columns.keys():
            raise ConfigError(f"{where}: no column memory.used (nor memory.free and memory.total); {REMEDY}")
        if "time" not in columns and self._interval is None:
            raise ConfigError(
                f"{where}: no column timestamp; add it to --query-gpu, or pass the time between two"
                " readings with --interval, such as 5s for -l 5"
            )
        self._columns = columns
        self._identity = next((name for name in IDENTITIES if name in columns), None)
        if self._identity is None:
            self._remarks.note(
                "identity", "no column identifies devices (uuid, pci.bus_id, index): all rows are treated as one device"
            )

    def row(self, number: int, line: str) -> Row | None:
        """Return the reading of a line; None for a header, which is used from now on, and for a message."""
        if line == self._header:
            return None
        try:
            return self._row(number, line)
        except (ValueError, IndexError):
            columns = header(line)
            if columns is not None:
                self.use(columns)
                self._header, self._width = line, line.count(",")
            elif _MESSAGE.match(line):
                self._remarks.note("message", f"line {number}: nvidia-smi reported: {line[:120]}")
            else:
                raise
            return None

    def _row(self, number: int, line: str) -> Row:
        cells = line.split(",")
        columns = self._columns
        if not columns:
            raise ValueError("a reading before any header")
        if not self._width:
            self._width = len(cells) - 1
        if len(cells) - 1 != self._width:
            cells = self._joined(cells, columns)
        used, size, *rest = (self._bytes(cells, field) for field in ("used", "size", "free", "reserved"))
        name, pid, index = (self._cell(cells, field) for field in ("name", "pid", "index"))
        device = label(self._device(self._cell(cells, self._identity) if self._identity else "", name, size))
        process = pid_of(pid) if "pid" in columns else None
        at = moment(self._cell(cells, "time")) if "time" in columns else self._rounds.at(device, process)
        if self._identity is None and process is None:
            self._one_device(number, at, line)
        gpu = int(index) if index.isdigit() and len(index) < 5 else None
        load = ratio(self._cell(cells, "utilization"))
        program = name if process is None else self._cell(cells, "program")
        return Row(number, at, device, process, used_of(used, size, *rest), size, None, None, load, gpu, label(program))

    def _cell(self, cells: list[str], field: str) -> str:
        column = self._columns.get(field)
        return cells[column.at].strip() if column else ""

    def _bytes(self, cells: list[str], field: str) -> int | None:
        column = self._columns.get(field)
        return amount(cells[column.at].strip(), column.factor) if column else None

    def _joined(self, cells: list[str], columns: Columns) -> list[str]:
        """Join cells that are parts of one program name. It may contain commas, and nvidia-smi does not quote."""
        extra = len(cells) - 1 - self._width
        if extra < 0 or "program" not in columns:
            raise ValueError(f"{len(cells)} cells, expected {self._width + 1}")
        at = columns["program"].at
        return [*cells[:at], ",".join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]

    def _device(self, identity: str, name: str, size: int | None) -> str:
        """Return the UUID or, without one, a label that changes when the device in a slot is replaced."""
        if self._identity == "uuid":
            if not identity:
                raise ValueError("the uuid is empty")
            return identity
        if self._identity in (None, "index"):
            identity = f"gpu{identity}"
        model = (name, size)
        known, swaps = self._models.get(identity, (model, 0))
        if known != model and size is not None:
            swaps += 1
        if size is not None or identity not in self._models:
            self._models[identity] = (model, swaps)
        return f"{identity}#{swaps + 1}" if swaps else identity

    def _one_device(self, number: int, at: float, line: str) -> None:
        before, self._previous = self._previous, (at, line)
        if "time" in self._columns and before and line != before[1] and 0 <= at - before[0] < SAME_MOMENT_SECONDS:
            raise ConfigError(
                f"{self._lines.name}, line {number}: two readings at one time and no column that identifies the"
                " devices; add uuid, index or pci.bus_id to --query-gpu"
            )


MOST_ELSE = 110
"""Upper limit of percentages, temperatures and indices."""

_TIME = re.compile(r"\d{4}[/-]\d\d[/-]\d\d[ T]\d\d:\d\d:\d\d.*")
_UUID = re.compile(r"(GPU|MIG)-\S{8,}")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_MEMORY = re.compile(r"\d+ MiB|\[.*\]")
_LOAD = re.compile(r"\d+ %")
_INTEGER = re.compile(r"\d+|\[.*\]")
PATTERNS = (("time", _TIME), ("uuid", _UUID), ("bus", _BUS))


def infer(name: str, rows: Sequence[Sequence[str]]) -> Columns:
    """Return the columns of a log without a header that are unambiguous. Raises ConfigError with the remedy."""
    width = Counter(len(row) for row in rows).most_common(1)
    cells = list(zip(*(row for row in rows if width and len(row) == width[0][0]), strict=True))
    columns = {field: LogColumn(at) for field, pattern in PATTERNS for at in _matching(cells, pattern)[:1]}
    # a device is identified by its uuid, its bus, or a column that counts
    taken = {column.at for column in columns.values()}
    device = next((columns[field].at for field in ("uuid", "bus") if field in columns), None)
    if device is None and (device := _index(cells, taken)) is not None:
        columns["index"] = LogColumn(device)
        taken.add(device)
    # amounts have a unit or, without one, are larger than other numbers
    memory = [at for at in _matching(cells, _MEMORY) if at not in taken and any("MiB" in cell for cell in cells[at])]
    large = [at for at in _matching(cells, _INTEGER) if at not in taken and _largest(cells[at]) > MOST_ELSE]
    bare = not memory
    if bare:
        memory = large
    elif len(large) == 1:  # if amounts have units, a large number without a unit is a pid
        columns |= dict([("pid", LogColumn(large[0])), ("program", LogColumn(large[0] + 1))][: len(cells) - large[0]])
    sizes = [at for at in memory if _is_size(cells, at, device, memory)]
    used = [at for at in memory if at not in sizes]
    if bare and len(used) == 1 and not sizes and len(set(cells[used[0]])) == 1:
        used = []  # the column may as well be the size
    if len(used) != 1 or len(sizes) > 1 or not cells:
        raise ConfigError(
            f"{name}, line 1: no header, and the column memory.used is ambiguous; record without noheader, or"
            " insert the names passed to --query-gpu as the first line of the log: timestamp, index, memory.used"
        )
    load = _matching(cells, _LOAD)
    found = [("used", used), ("size", sizes), ("utilization", load if len(load) == 1 else [])]
    return columns | {field: LogColumn(at) for field, places in found for at in places}


def _matching(columns: Sequence[Sequence[str]], pattern: re.Pattern[str]) -> list[int]:
    return [at for at, cells in enumerate(columns) if all(pattern.fullmatch(cell) for cell in cells)]


def _numbers(cells: Sequence[str]) -> Iterator[int]:
    return (int(cell.split()[0]) for cell in cells if cell[:1].isdigit())


def _largest(cells: Sequence[str]) -> int:
    return max(_numbers(cells), default=0)


def _index(columns: Sequence[Sequence[str]], taken: set[int]) -> int | None:
    """Return the column that counts 0, 1, 2, … 0, 1, 2 like device indices. A column of zeros is ambiguous."""
    for at, cells in enumerate(columns):
        if at in taken or not all(cell.isdigit() for cell in cells):
            continue
        numbers = list(_numbers(cells))
        count = max(numbers) + 1
        if 1 < count <= 64 and len(numbers) >= 2 * count and numbers == [n % count for n in range(len(numbers))]:
            return at
    return None


def _is_size(columns: Sequence[Sequence[str]], at: int, device: int | None, memory: Sequence[int]) -> bool:
    """Return whether a column is constant for each device and never less than the others."""
    values: dict[str, set[str]] = {}
    for row, cell in enumerate(columns[at]):
        values.setdefault(columns[device][row] if device is not None else "", set()).add(cell)
    others = [columns[other] for other in memory if other != at]
    if any(len(cells) != 1 for cells in values.values()) or not others:
        return False
    return all(
        int(size.split()[0]) >= int(cell.split()[0])
        for cells in others
        for size, cell in zip(columns[at], cells, strict=True)
        if cell[:1].isdigit() and size[:1].isdigit()
    )


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_DATE = re.compile(rf"\w{{3}} ({'|'.join(MONTHS)}) +(\d{{1,2}}) (\d\d):(\d\d):(\d\d) (\d{{4}})")
_START = re.compile(r"\| NVIDIA-SMI ")
_DEVICE_LINE = re.compile(r"\|\s+(\d{1,4})\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:\S+)\s")
_MEMORY_LINE = re.compile(r"\|[^|]*\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|\s*(?:(\d{1,2}|100)%|N/A|ERR!)")
_PROCESS_LINE = re.compile(
    r"\|\s+(\d{1,4})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?([1-9]\d{0,9})\s+[A-Z+]+\s+(\S.*?)\s+(\d{1,9})MiB\s*\|"
)


class _Device(NamedTuple):
    gpu: int
    name: str
    bus: str


def _is_table(line: str) -> bool:
    """Return whether a log with this first line consists of tables."""
    return line.startswith("+--") or _START.match(line) is not None or _DATE.match(line) is not None


def _table_rows(numbered: Iterator[tuple[int, str]], remarks: Remarks, interval: float | None) -> Iterator[Row]:
    """Yield the rows of all tables. ``interval``: seconds between two tables without a date. Raises ConfigError.

    The processes of a device are unknown until its table lists one, because a container hides those of others.
    Processes without an amount of memory are ignored.
    """
    at: float | None = None
    tables = 0
    device: _Device | None = None
    buses: dict[int, str] = {}
    for number, line in numbered:
        if match := _DATE.search(line):
            at = _date(match)
        elif _START.match(line):
            at = interval * tables if at is None and interval is not None else at
            if at is None:
                raise ConfigError(
                    f"{remarks.name}, line {number}: this table has no timestamp; pass the time between tables with"
                    " --interval, such as 5s"
                )
            started, at, device = at, None, None
            tables += 1
        elif not tables:
            continue
        elif match := _DEVICE_LINE.match(line):
            device = _Device(int(match[1]), label(match[2]), label(match[3]))
            buses[device.gpu] = device.bus
        elif device is not None and (match := _MEMORY_LINE.match(line)):
            load = int(match[3]) / 100 if match[3] else None
            used, size = int(match[1]) * MIB, int(match[2]) * MIB
            remarks.rows += 1
            yield Row(number, started, device.bus, None, used, size, None, None, load, device.gpu, device.name)
            device = None
        elif (match := _PROCESS_LINE.match(line)) and int(match[1]) in buses:
            index = int(match[1])
            remarks.rows += 1
            yield Row(
                number, started, buses[index], int(match[2]), int(match[4]) * MIB, gpu=index, name=label(match[3])
            )


def _date(match: re.Match[str]) -> float:
    month = MONTHS.index(match[1]) + 1
    day, hour, minute, second, year = (int(match[group]) for group in range(2, 7))
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise ConfigError(f"{match[0]!r} isn't a time: {error}") from None


FORMAT = Format("nvidia-smi", scrolling.starts, from_rows(rows, complete=True))
