"""Sensor logs of GPU-Z: ``Date , GPU Clock [MHz] , … , Memory Used (Dedicated) [MB] , GPU Load [%] ,``.

One log has one device, and neither its name nor its size. MB are MiB. Dates are local time without a zone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings.reader import Lines, LogRow, Remarks, parse_amount, parse_ratio, parse_rows, parse_time
from gpumond.features.recordings.snapshots import Format, from_rows

USED = ("memory used (dedicated) [mb]", "memory used [mb]", "memory usage [mb]")
"""Names of the column in newer and older versions. Dynamic memory is the host's."""
LOAD = "gpu load [%]"


def detect(line: str) -> bool:
    """Return True if this line is the header of a sensor log."""
    first, *others = _names(line)
    return first == "date" and any(name.endswith("]") for name in others)


def rows(lines: Lines, remarks: Remarks, interval: float | None = None) -> Iterator[LogRow]:
    """Yield the rows of a log. Raises ConfigError."""
    used: int | None = None
    load: int | None = None

    def row(number: int, line: str) -> LogRow | None:
        nonlocal used, load
        if detect(line):  # GPU-Z appends to an existing log
            names = _names(line)
            used = next((names.index(name) for name in USED if name in names), None)
            load = names.index(LOAD) if LOAD in names else None
            if used is None:
                raise ConfigError(
                    f"{lines.name}, line {number}: no column Memory Used [MB]; enable this sensor in GPU-Z"
                )
            return None
        if used is None:
            raise ValueError("a reading before any header")
        cells = [cell.strip() for cell in line.split(",")]
        percent = None if load is None else parse_ratio(cells[load])
        return LogRow(
            number, parse_time(cells[0]), "gpu", None, parse_amount(cells[used], MIB), utilization_ratio=percent, gpu=0
        )

    return parse_rows(lines.numbered(), row, remarks)


def _names(line: str) -> list[str]:
    return [cell.strip().lower() for cell in line.split(",")]


FORMAT = Format("gpu-z", detect, from_rows(rows))
