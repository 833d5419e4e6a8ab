"""Plain CSV: ``time,uuid,pid,used_bytes[,live_bytes,held_bytes,size_bytes,utilization]``.

Columns in any order, named in the first line; without names, in the order above. ``time`` is in seconds or
ISO 8601 (UTC without a zone). An empty pid means the whole device. ``utilization`` is a ratio from 0 to 1, or a
percentage if its name or a cell says so or one of the first 1000 values is above 1.

Scripts that write their own logs name their columns differently, such as ``memory_used_mib`` or ``mem_reserved_gb``.
Such a name is accepted with its unit.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

from gpumond.facts.errors import ConfigError
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.facts.units import plural
from gpumond.features.recordings.reader import (
    UNIT_BYTES,
    UNKNOWN_TEXTS,
    LogLines,
    LogRow,
    Remarks,
    parse_amount,
    parse_pid,
    parse_ratio,
    parse_rows,
    parse_time,
    sanitize_name,
)
from gpumond.features.recordings.snapshots import Format, snapshot_reader
from gpumond.tick.claims import outermost_pools

COLUMNS = ("time", "uuid", "pid", "used_bytes", "live_bytes", "held_bytes", "size_bytes", "utilization")
COLUMN_ALIASES = {
    "timestamp": "time",
    "gpu_uuid": "uuid",
    "device_uuid": "uuid",
    "device": "uuid",
    "gpu": "uuid",
    "gpu_id": "uuid",
    "gpu_index": "uuid",
    "utilization_ratio": "utilization",
    "gpu_utilization_ratio": "utilization",
}
COLUMN_OF_AMOUNT = {"used": "used_bytes", "total": "size_bytes", "allocated": "live_bytes", "reserved": "held_bytes"}
_AMOUNT = re.compile(
    rf"(?:gpu_|vram_|cuda_)?(?:memory|mem|vram)_({'|'.join(COLUMN_OF_AMOUNT)})_({'|'.join(UNIT_BYTES)})"
)
_NVIDIA_SMI = re.compile(r", |\.|used_(?:gpu_)?memory")
"""What only a line of nvidia-smi contains."""
_UTILIZATION_PERCENT = re.compile(r"(?:utilization_gpu|util_gpu|gpu_utilization|gpu_util|utilization)_(?:pct|percent)")
REQUIRED_COLUMNS = ("time", "used_bytes")
AMOUNT_COLUMNS = ("used_bytes", "size_bytes", "live_bytes", "held_bytes")
REMEDY = f"expected {','.join(COLUMNS[:4])}[,{','.join(COLUMNS[4:])}]"
PEEKED_LINES = 1000

NumberedCells = tuple[int, list[str]]


def column_positions(line: str) -> dict[str, int] | None:
    """Return the position of each column; None if this line does not name columns."""
    positions = {_column_name(name): index for index, name in reversed(list(enumerate(_names(line))))}
    return positions if positions.keys() & {"time", "used_bytes", "live_bytes"} else None


def _names(line: str) -> list[str]:
    return [cell.strip().strip('"').lower() for cell in line.split(delimiter(line))]


def _column_name(name: str) -> str:
    if match := _AMOUNT.fullmatch(name):
        return COLUMN_OF_AMOUNT[match[1]]
    return "utilization" if _UTILIZATION_PERCENT.fullmatch(name) else COLUMN_ALIASES.get(name, name)


def _unit_bytes(line: str) -> dict[str, int]:
    """Return the bytes in one unit of each column whose name contains a unit."""
    matches = [match for name in _names(line) if (match := _AMOUNT.fullmatch(name))]
    return {COLUMN_OF_AMOUNT[match[1]]: UNIT_BYTES[match[2]] for match in reversed(matches)}


def delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def detect(first_line: str) -> bool:
    positions = column_positions(first_line)
    if positions is None:
        return ", " not in first_line and _begins_with_a_time(first_line)
    return bool(positions.keys() & {"used_bytes", "live_bytes"}) or not _NVIDIA_SMI.search(first_line)


def _begins_with_a_time(line: str) -> bool:
    try:
        parse_time(line.split(delimiter(line))[0].strip())
    except ValueError:
        return False
    return True


def rows(lines: LogLines, remarks: Remarks, interval: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigError."""
    first_line = lines.first_line()
    named_positions = column_positions(first_line)
    positions = named_positions or _default_positions(lines.name, first_line)
    if "time" not in positions or not positions.keys() & {"used_bytes", "live_bytes"}:
        missing = "time" if "time" not in positions else "used_bytes"
        raise ConfigError(f"{lines.name}, line 1: no column {missing}; {REMEDY}")
    numbered_cells = _numbered_cells(lines, delimiter(first_line), positions if named_positions else None)
    peeked = list(islice(numbered_cells, PEEKED_LINES))
    utilization_index = positions.get("utilization")
    is_percent = utilization_index is not None and (
        any(_UTILIZATION_PERCENT.fullmatch(name) for name in _names(first_line))
        or any(len(cells) > utilization_index and _is_percent(cells[utilization_index].strip()) for _, cells in peeked)
    )
    unit_bytes = _unit_bytes(first_line) if named_positions else {}

    def row(number: int, cells: Sequence[str]) -> LogRow:
        def cell(column: str) -> str:
            index = positions.get(column)
            if index is None or (index >= len(cells) and column not in REQUIRED_COLUMNS):
                return ""
            return cells[index].strip()

        pid = cell("pid")
        used, size, live, held = (parse_amount(cell(column), unit_bytes.get(column, 1)) for column in AMOUNT_COLUMNS)
        return LogRow(
            number,
            parse_time(cell("time")),
            sanitize_name(cell("uuid") or "gpu"),
            None if pid.lower() in UNKNOWN_TEXTS else parse_pid(pid),
            used,
            size,
            live,
            held,
            parse_ratio(cell("utilization"), is_percent),
        )

    return parse_rows(chain(peeked, numbered_cells), row, remarks)


def _default_positions(name: str, first_line: str) -> dict[str, int]:
    cells = first_line.split(delimiter(first_line))
    if not _begins_with_a_time(first_line):
        raise ConfigError(f"{name}, line 1: no column time, and no time in the first cell; {REMEDY}")
    if not 4 <= len(cells) <= len(COLUMNS):
        raise ConfigError(f"{name}, line 1: {plural(len(cells), 'column')} without names; {REMEDY}")
    return {column: index for index, column in enumerate(COLUMNS[: len(cells)])}


def _numbered_cells(lines: LogLines, separator: str, positions: Mapping[str, int] | None) -> Iterator[NumberedCells]:
    for number, line in lines.numbered():
        if positions is not None and not line[:1].isdigit() and column_positions(line) == positions:
            continue
        yield number, line.split(separator) if '"' not in line else next(csv.reader([line], delimiter=separator))


def _is_percent(text: str) -> bool:
    try:
        return text.endswith("%") or float(text) > 1
    except ValueError:
        return False


FORMAT = Format("csv", detect, snapshot_reader(rows))
CSV_HEADER = ",".join(COLUMNS) + "\n"

LiveAndHeldBytes = tuple[int | None, int | None]
"""Live bytes of one program on one device, and its held bytes; None if an allocator does not know them."""


def csv_lines(snapshot: Snapshot) -> str:
    """Return the lines of one snapshot. A device without new values has none; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for device in snapshot.devices:
        if not device.missed_readings:
            for cells in _device_rows(device, live_and_held_bytes(snapshot, device.uuid)):
                writer.writerow((f"{snapshot.taken_at:.3f}", device.uuid, *cells))
    return text.getvalue()


def _device_rows(device: DeviceReading, amounts: Mapping[ProcessKey, LiveAndHeldBytes]) -> Iterator[tuple[object, ...]]:
    utilization = device.sensors.gpu_utilization_ratio
    yield None, device.used_bytes, None, None, device.size_bytes, None if utilization is None else f"{utilization:.4f}"
    usages = device.processes_by_key
    for key in dict.fromkeys((*usages, *amounts)):
        used = usages[key].used_bytes if key in usages else None
        live, held = amounts.get(key, (None, None))
        if used is not None or live is not None or held is not None:
            yield key.pid, used, live, held, None, None


def live_and_held_bytes(snapshot: Snapshot, uuid: str) -> dict[ProcessKey, LiveAndHeldBytes]:
    """Return live and held bytes of each program on a device whose agent reports them."""
    amounts: dict[ProcessKey, LiveAndHeldBytes] = {}
    for report in snapshot.reports:
        pools = [pool for pool in outermost_pools(report.pools) if pool.device_uuid == uuid]
        if pools:
            held = sum(pool.held_bytes for pool in pools) if all(pool.held_known for pool in pools) else None
            live = [pool.live_bytes for pool in pools if pool.live_bytes is not None]
            amounts[report.key] = sum(live) if len(live) == len(pools) else None, held
    return amounts
