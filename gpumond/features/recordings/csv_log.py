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
    UNITS,
    UNKNOWN,
    Lines,
    LogRow,
    Remarks,
    label,
    parse_amount,
    parse_pid,
    parse_ratio,
    parse_rows,
    parse_time,
)
from gpumond.features.recordings.snapshots import Format, from_rows
from gpumond.tick.claims import outermost_pools

COLUMNS = ("time", "uuid", "pid", "used_bytes", "live_bytes", "held_bytes", "size_bytes", "utilization")
ALSO = {
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
AMOUNTS = {"used": "used_bytes", "total": "size_bytes", "allocated": "live_bytes", "reserved": "held_bytes"}
_AMOUNT = re.compile(rf"(?:gpu_|vram_|cuda_)?(?:memory|mem|vram)_({'|'.join(AMOUNTS)})_({'|'.join(UNITS)})")
_OTHER = re.compile(r", |\.|used_(?:gpu_)?memory")
"""What is in a line of nvidia-smi, and not in one of these logs."""
_LOAD = re.compile(r"(?:utilization_gpu|util_gpu|gpu_utilization|gpu_util|utilization)_(?:pct|percent)")
REQUIRED = ("time", "used_bytes")
AMOUNT_COLUMNS = ("used_bytes", "size_bytes", "live_bytes", "held_bytes")
REMEDY = f"expected {','.join(COLUMNS[:4])}[,{','.join(COLUMNS[4:])}]"
PEEKED_LINES = 1000

Cells = tuple[int, list[str]]


def column_positions(line: str) -> dict[str, int] | None:
    """Return the position of each column; None if this line does not name columns."""
    found = {_column(name): at for at, name in reversed(list(enumerate(_cells_of(line))))}
    return found if found.keys() & {"time", "used_bytes", "live_bytes"} else None


def _cells_of(line: str) -> list[str]:
    return [cell.strip().strip('"').lower() for cell in line.split(delimiter(line))]


def _column(name: str) -> str:
    amount = _AMOUNT.fullmatch(name)
    return AMOUNTS[amount[1]] if amount else "utilization" if _LOAD.fullmatch(name) else ALSO.get(name, name)


def _factors(line: str) -> dict[str, int]:
    """Return the bytes in one unit of each column whose name contains a unit."""
    amounts = [match for name in _cells_of(line) if (match := _AMOUNT.fullmatch(name))]
    return {AMOUNTS[amount[1]]: UNITS[amount[2]] for amount in reversed(amounts)}


def delimiter(line: str) -> str:
    return max(",;\t", key=line.count)


def detect(first: str) -> bool:
    named = column_positions(first)
    if named is None:
        return ", " not in first and _begins_with_a_time(first)
    return bool(named.keys() & {"used_bytes", "live_bytes"}) or not _OTHER.search(first)


def _begins_with_a_time(line: str) -> bool:
    try:
        parse_time(line.split(delimiter(line))[0].strip())
    except ValueError:
        return False
    return True


def rows(lines: Lines, remarks: Remarks, interval: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigError."""
    first = lines.first()
    named = column_positions(first)
    columns = named or _ordered(lines.name, first)
    if "time" not in columns or not columns.keys() & {"used_bytes", "live_bytes"}:
        missing = "time" if "time" not in columns else "used_bytes"
        raise ConfigError(f"{lines.name}, line 1: no column {missing}; {REMEDY}")
    read = _cells(lines, delimiter(first), columns if named else None)
    peeked = list(islice(read, PEEKED_LINES))
    load = columns.get("utilization")
    percent = load is not None and (
        any(_LOAD.fullmatch(name) for name in _cells_of(first))
        or any(len(cells) > load and _is_percent(cells[load].strip()) for _, cells in peeked)
    )
    factors = _factors(first) if named else {}

    def row(number: int, cells: Sequence[str]) -> LogRow:
        def cell(column: str) -> str:
            at = columns.get(column)
            return "" if at is None or (at >= len(cells) and column not in REQUIRED) else cells[at].strip()

        pid = cell("pid")
        used, size, live, held = (parse_amount(cell(column), factors.get(column, 1)) for column in AMOUNT_COLUMNS)
        return LogRow(
            number,
            parse_time(cell("time")),
            label(cell("uuid") or "gpu"),
            None if pid.lower() in UNKNOWN else parse_pid(pid),
            used,
            size,
            live,
            held,
            parse_ratio(cell("utilization"), percent),
        )

    return parse_rows(chain(peeked, read), row, remarks)


def _ordered(name: str, first: str) -> dict[str, int]:
    cells = first.split(delimiter(first))
    if not _begins_with_a_time(first):
        raise ConfigError(f"{name}, line 1: no column time, and no time in the first cell; {REMEDY}")
    if not 4 <= len(cells) <= len(COLUMNS):
        raise ConfigError(f"{name}, line 1: {plural(len(cells), 'column')} without names; {REMEDY}")
    return {column: at for at, column in enumerate(COLUMNS[: len(cells)])}


def _cells(lines: Lines, separator: str, columns: Mapping[str, int] | None) -> Iterator[Cells]:
    for number, line in lines.numbered():
        if columns is not None and not line[:1].isdigit() and column_positions(line) == columns:
            continue
        yield number, line.split(separator) if '"' not in line else next(csv.reader([line], delimiter=separator))


def _is_percent(text: str) -> bool:
    try:
        return text.endswith("%") or float(text) > 1
    except ValueError:
        return False


FORMAT = Format("csv", detect, from_rows(rows))
HEADER = ",".join(COLUMNS) + "\n"

Amounts = tuple[int | None, int | None]
"""Live bytes of one program on one device, and its held bytes; None if an allocator does not know them."""


def csv_lines(snapshot: Snapshot) -> str:
    """Return the lines of one snapshot. A device without new values has none; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for device in snapshot.devices:
        if not device.missed_readings:
            for cells in _rows(device, amounts_of(snapshot, device.uuid)):
                writer.writerow((f"{snapshot.taken_at:.3f}", device.uuid, *cells))
    return text.getvalue()


def _rows(device: DeviceReading, amounts: Mapping[ProcessKey, Amounts]) -> Iterator[tuple[object, ...]]:
    load = device.sensors.gpu_utilization_ratio
    yield None, device.used_bytes, None, None, device.size_bytes, None if load is None else f"{load:.4f}"
    listed = device.processes_by_key
    for key in dict.fromkeys((*listed, *amounts)):
        used = listed[key].used_bytes if key in listed else None
        live, held = amounts.get(key, (None, None))
        if used is not None or live is not None or held is not None:
            yield key.pid, used, live, held, None, None


def amounts_of(snapshot: Snapshot, uuid: str) -> dict[ProcessKey, Amounts]:
    """Return live and held bytes of each program on a device whose agent reports them."""
    found: dict[ProcessKey, Amounts] = {}
    for report in snapshot.reports:
        own = [pool for pool in outermost_pools(report.pools) if pool.device_uuid == uuid]
        if own:
            held = sum(pool.held_bytes for pool in own) if all(pool.held_known for pool in own) else None
            live = [pool.live_bytes for pool in own if pool.live_bytes is not None]
            found[report.key] = sum(live) if len(live) == len(own) else None, held
    return found
