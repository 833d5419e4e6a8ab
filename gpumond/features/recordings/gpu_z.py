"""Sensor logs of GPU-Z: ``Date , GPU Clock [MHz] , … , Memory Used (Dedicated) [MB] , GPU Load [%] ,``.

One log has one device, and neither its name nor its size. MB are MiB. Dates are local time without a zone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings.reader import (
    LogLines,
    LogRow,
    Remarks,
    parse_amount,
    parse_ratio,
    parse_rows,
    parse_time,
)
from gpumond.features.recordings.snapshots import Format, snapshot_reader

USED_COLUMNS = ("memory used (dedicated) [mb]", "memory used [mb]", "memory usage [mb]")
"""Names of the column in newer and older versions. Dynamic memory is the host's."""
UTILIZATION_COLUMN = "gpu load [%]"


def detect(line: str) -> bool:
    """Return True if this line is the header of a sensor log."""
    first, *others = _names(line)
    return first == "date" and any(name.endswith("]") for name in others)


def rows(lines: LogLines, remarks: Remarks, interval_seconds: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigError."""
    used_index: int | None = None
    utilization_index: int | None = None

    def row(number: int, line: str) -> LogRow | None:
        nonlocal used_index, utilization_index
        if detect(line):  # GPU-Z appends to an existing log
            names = _names(line)
            used_index = next((names.index(name) for name in USED_COLUMNS if name in names), None)
            utilization_index = names.index(UTILIZATION_COLUMN) if UTILIZATION_COLUMN in names else None
            if used_index is None:
                raise ConfigError(
                    f"{lines.name}, line {number}: no column Memory Used [MB]; enable this sensor in GPU-Z"
                )
            return None
        if used_index is None:
            raise ValueError("a reading before any header")
        cells = [cell.strip() for cell in line.split(",")]
        utilization = None if utilization_index is None else parse_ratio(cells[utilization_index])
        return LogRow(
            number,
            parse_time(cells[0]),
            "gpu",
            None,
            parse_amount(cells[used_index], MIB),
            utilization_ratio=utilization,
            gpu=0,
        )

    return parse_rows(lines.numbered(), row, remarks)


def _names(line: str) -> list[str]:
    return [cell.strip().lower() for cell in line.split(",")]


FORMAT = Format("gpu-z", detect, snapshot_reader(rows))
