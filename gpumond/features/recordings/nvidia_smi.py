"""Logs of ``nvidia-smi --query-gpu=… --format=csv[,noheader,nounits] -l N``, and of ``--query-compute-apps``.

Columns may be in any order, units in the header or in the cells. Headers may be repeated, and a log may contain
several devices. ``smi_table`` reads the default table, ``scrolling`` the tables of ``dmon`` and ``pmon``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings import scrolling, smi_table
from gpumond.features.recordings.reader import Lines
from gpumond.features.recordings.snapshots import MOST_DIGITS, Remarks, Row, label, moment, pid_of

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
UNITS = {"": 1024**2, "b": 1, "bytes": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "%": 0.01, "w": 1, "mhz": 1}
SAME_MOMENT_SECONDS = 0.02
TO_INFER_FROM = 5000
_CELL = re.compile(r"([a-z][\w.]*)(?: \[(.*)\])?")
_MESSAGE = re.compile(r"(Unable to|Failed to|NVIDIA-SMI|No devices|No running|Unknown Error|GPU is lost|Terminated)")
_OTHER = re.compile(r"\|[ =]|={10,}NVSMI")


class LogColumn(NamedTuple):
    field: str
    at: int
    factor: float


Columns = dict[str, LogColumn]


def header(line: str) -> Columns | None:
    """Return the columns that this line names; None if it is not a header."""
    found: Columns = {}
    for at, cell in enumerate(line.split(",")):
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            return None
        field = FIELDS.get(match[1])
        if field is not None and field not in found:
            found[field] = LogColumn(
                field, at, 0.01 if field == "utilization" else UNITS.get((match[2] or "").lower(), 1)
            )
    return found or None


def rows(lines: Lines, remarks: Remarks, interval: float | None = None) -> Iterator[Row]:
    """Yield the rows of a log. ``interval``: the N of ``-l N``, without timestamps. Raises ConfigError."""
    text = iter(lines)
    log = _Log(lines, remarks, interval)
    first = lines.first().strip()
    if smi_table.starts(first):
        yield from smi_table.rows(_remaining_lines(lines, text), remarks, interval)
        return
    if scrolling.starts(first):
        yield from scrolling.rows(_remaining_lines(lines, text), remarks, interval)
        return
    if _OTHER.match(first):
        raise ConfigError(f"{lines.name}, line 1: this is the output of nvidia-smi -q, not CSV; {REMEDY}")
    columns = header(first)
    if columns is None:
        numbered = _numbered(lines, islice(text, TO_INFER_FROM))
        log.use(
            {c.field: c for c in (LogColumn(*known) for known in infer(lines.name, [cells for _, cells in numbered]))}
        )
        yield from log.read(
            chain(((number, ", ".join(cells)) for number, cells in numbered), _remaining_lines(lines, text))
        )
    else:
        yield from log.read(_remaining_lines(lines, text))


def _numbered(lines: Lines, text: Iterator[str]) -> list[tuple[int, list[str]]]:
    return [(lines.number, [cell.strip() for cell in line.split(",")]) for line in text if lines.whole]


def _remaining_lines(lines: Lines, text: Iterator[str]) -> Iterator[tuple[int, str]]:
    return ((lines.number, line) for line in text if lines.whole)


class _Log:
    """Parser of rows with the columns of the last header."""

    def __init__(self, lines: Lines, remarks: Remarks, interval: float | None) -> None:
        self._lines, self._remarks, self._interval = lines, remarks, interval
        self._columns: Columns = {}
        self._identity: LogColumn | None = None
        self._width = 0
        self._round: set[tuple[str, int | None]] = set()
        self._rounds = 0
        self._models: dict[str, tuple[tuple[str, int | None], int]] = {}
        self._previous: tuple[float, str] | None = None

    def use(self, columns: Columns) -> None:
        where = f"{self._lines.name}, line {max(1, self._lines.number)}"
        if "used" not in columns and not {"free", "size"} <= columns.keys():
            raise ConfigError(f"{where}: no column memory.used (nor memory.free and memory.total); {REMEDY}")
        if "time" not in columns and self._interval is None:
            raise ConfigError(
                f"{where}: no column timestamp; add it to --query-gpu, or pass the seconds between two"
                " readings with --interval N, as in -l N"
            )
        self._columns = columns
        self._identity = next((columns[name] for name in IDENTITIES if name in columns), None)
        if self._identity is None:
            self._remarks.note(
                "identity", "no column identifies devices (uuid, pci.bus_id, index): all rows are treated as one device"
            )

    def read(self, numbered: Iterator[tuple[int, str]]) -> Iterator[Row]:
        current = ""
        for number, line in numbered:
            if line == current:
                continue
            try:
                row = self._row(number, line)
            except (ValueError, IndexError) as error:
                columns = header(line)
                if columns is not None:
                    self.use(columns)
                    current, self._width = line, line.count(",")
                elif _MESSAGE.match(line):
                    self._remarks.note("message", f"line {number}: nvidia-smi reported: {line[:120]}")
                else:
                    self._remarks.skip(number, str(error))
                continue
            self._remarks.rows += 1
            yield row

    def _row(self, number: int, line: str) -> Row:
        cells = line.split(",")
        columns = self._columns
        if not columns:
            raise ValueError("a reading before any header")
        if not self._width:
            self._width = len(cells) - 1
        if len(cells) - 1 != self._width:
            cells = self._joined(cells, columns)
        size, used, free, reserved = (self._bytes(cells, field) for field in ("size", "used", "free", "reserved"))
        if used is None and size is not None and free is not None:
            used = max(0, size - free - (reserved or 0))
        name, pid, index = (self._cell(cells, field) for field in ("name", "pid", "index"))
        device = label(self._device(cells[self._identity.at].strip() if self._identity else "", name, size))
        process = pid_of(pid) if "pid" in columns else None
        at = moment(cells[columns["time"].at].strip()) if "time" in columns else self._counted(device, process)
        if self._identity is None and process is None:
            self._one_device(number, at, line)
        gpu = int(index) if index.isdigit() and len(index) < 5 else None
        load = _ratio(self._cell(cells, "utilization"))
        program = name if process is None else self._cell(cells, "program")
        return Row(number, at, device, process, used, size, None, None, load, gpu, label(program))

    def _cell(self, cells: list[str], field: str) -> str:
        column = self._columns.get(field)
        return cells[column.at].strip() if column else ""

    def _bytes(self, cells: list[str], field: str) -> int | None:
        column = self._columns.get(field)
        return _amount(cells[column.at].strip(), column.factor) if column else None

    def _joined(self, cells: list[str], columns: Columns) -> list[str]:
        """Join cells that are parts of one program name. It may contain commas, and nvidia-smi does not quote."""
        extra = len(cells) - 1 - self._width
        if extra < 0 or "program" not in columns:
            raise ValueError(f"{len(cells)} cells, expected {self._width + 1}")
        at = columns["program"].at
        return [*cells[:at], ",".join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]]

    def _device(self, own: str, name: str, size: int | None) -> str:
        """Return the UUID or, without one, a label that changes when the device in a slot is replaced."""
        if self._identity is None or self._identity.field != "uuid":
            own = own if self._identity and self._identity.field != "index" else f"gpu{own}"
            model = (name, size)
            known, swaps = self._models.get(own, (model, 0))
            if known != model and size is not None:
                swaps += 1
            if size is not None or own not in self._models:
                self._models[own] = (model, swaps)
            return f"{own}#{swaps + 1}" if swaps else own
        if not own:
            raise ValueError("the uuid is empty")
        return own

    def _counted(self, device: str, pid: int | None) -> float:
        """Return the seconds since the start, from the number of repetitions of a device or process."""
        if (device, pid) in self._round:
            self._rounds += 1
            self._round.clear()
        self._round.add((device, pid))
        return self._rounds * (self._interval or 1.0)

    def _one_device(self, number: int, at: float, line: str) -> None:
        before, self._previous = self._previous, (at, line)
        if "time" in self._columns and before and line != before[1] and 0 <= at - before[0] < SAME_MOMENT_SECONDS:
            raise ConfigError(
                f"{self._lines.name}, line {number}: two readings at one time and no column that identifies the"
                " devices; add uuid, index or pci.bus_id to --query-gpu"
            )


def _amount(cell: str, factor: float) -> int | None:
    if cell.isdigit() and len(cell) < MOST_DIGITS:
        return int(int(cell) * factor)
    if not cell or cell[0] == "[" or cell in ("N/A", "ERR!"):
        return None
    number, _, unit = cell.partition(" ")
    if unit:
        factor = UNITS[unit.lower()] if unit.lower() in UNITS else _no_unit(cell)
    value = float(number)
    if not 0 <= value < 2**53:
        raise ValueError(f"{cell[:40]!r} is not an amount of memory")
    return int(value * factor)


def _ratio(cell: str) -> float | None:
    number = cell.removesuffix("%").strip()
    return int(number) / 100 if number.isdigit() and int(number) <= 100 else None


def _no_unit(cell: str) -> float:
    raise ValueError(f"{cell[:40]!r}: expected MiB")


MOST_ELSE = 110
"""Upper limit of percentages, temperatures and indices."""

_TIME = re.compile(r"\d{4}[/-]\d\d[/-]\d\d[ T]\d\d:\d\d:\d\d.*")
_UUID = re.compile(r"(GPU|MIG)-\S{8,}")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
_MEMORY = re.compile(r"\d+ MiB|\[.*\]")
_LOAD = re.compile(r"\d+ %")
_INTEGER = re.compile(r"\d+|\[.*\]")
PATTERNS = (("time", _TIME), ("uuid", _UUID), ("bus", _BUS))

Known = tuple[str, int, float]


def infer(name: str, rows: Sequence[Sequence[str]]) -> list[Known]:
    """Return (field, position, factor) of each unambiguous column. Raises ConfigError with the remedy."""
    width = Counter(len(row) for row in rows).most_common(1)
    whole = [row for row in rows if width and len(row) == width[0][0]]
    columns = list(zip(*whole, strict=True))
    found = [(field, at, 1.0) for field, pattern in PATTERNS for at in _matching(columns, pattern)[:1]]
    taken = {at for _, at, _ in found}
    device = next((at for field, at, _ in found if field in ("uuid", "bus")), None)
    index = _index(columns, taken) if device is None else None
    if index is not None:
        found.append(("index", index, 1.0))
        device = index
    taken = {at for _, at, _ in found}
    memory = [at for at in _matching(columns, _MEMORY) if at not in taken and any("MiB" in c for c in columns[at])]
    large = [at for at in _matching(columns, _INTEGER) if at not in taken and _largest(columns[at]) > MOST_ELSE]
    bare = not memory
    if bare:
        memory = large
    elif len(large) == 1:  # if amounts have units, a large number without a unit is a pid
        found += [("pid", large[0], 1.0), ("program", large[0] + 1, 1.0)][: len(columns) - large[0]]
    sizes = [at for at in memory if _is_size(columns, at, device, memory)]
    used = [at for at in memory if at not in sizes]
    if bare and len(used) == 1 and not sizes and len(set(columns[used[0]])) == 1:
        used = []  # the column may as well be the size
    if len(used) != 1 or len(sizes) > 1 or not columns:
        raise ConfigError(
            f"{name}, line 1: no header, and the column memory.used is ambiguous; record without noheader, or"
            " insert the names passed to --query-gpu as the first line of the log: timestamp, index, memory.used"
        )
    found += [("used", used[0], float(MIB)), *(("size", at, float(MIB)) for at in sizes)]
    load = _matching(columns, _LOAD)
    return [*found, ("utilization", load[0], 0.01)] if len(load) == 1 else found


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
    own: dict[str, set[str]] = {}
    for row, cell in enumerate(columns[at]):
        own.setdefault(columns[device][row] if device is not None else "", set()).add(cell)
    others = [each for each in memory if each != at]
    if any(len(values) != 1 for values in own.values()) or not others:
        return False
    mine = list(columns[at])
    return all(
        cell[:1].isdigit() and int(mine[row].split()[0]) >= int(cell.split()[0])
        for each in others
        for row, cell in enumerate(columns[each])
        if cell[:1].isdigit() and mine[row][:1].isdigit()
    )
