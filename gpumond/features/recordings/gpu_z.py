"""Sensor logs of GPU-Z: ``Date , GPU Clock [MHz] , … , Memory Used (Dedicated) [MB] , GPU Load [%] ,``.

One log has one device, and neither its name nor its size. MB are MiB. Dates are local time without a zone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings.reader import Lines
from gpumond.features.recordings.snapshots import Remarks, Row, moment

USED = ("memory used (dedicated) [mb]", "memory used [mb]")
"""Names of the column in newer and older versions. Dynamic memory is the host's."""
LOAD = "gpu load [%]"
DEVICE = "gpu"


def starts(line: str) -> bool:
    """Return True if this line is the header of a sensor log."""
    first, *others = _names(line)
    return first == "date" and any(name.endswith("]") for name in others)


def rows(lines: Lines, remarks: Remarks) -> Iterator[Row]:
    """Yield the rows of a log. Raises ConfigError."""
    used: int | None = None
    load: int | None = None
    for line in lines:
        if not lines.whole:
            continue
        if starts(line):  # GPU-Z appends to an existing log
            names = _names(line)
            used = next((names.index(name) for name in USED if name in names), None)
            load = names.index(LOAD) if LOAD in names else None
            if used is None:
                raise ConfigError(
                    f"{lines.name}, line {lines.number}: no column Memory Used [MB]; enable this sensor in GPU-Z"
                )
            continue
        try:
            row = _row(lines.number, line.split(","), used, load)
        except (ValueError, IndexError) as error:
            remarks.skip(lines.number, "too few cells" if isinstance(error, IndexError) else str(error))
            continue
        remarks.rows += 1
        yield row


def _row(number: int, cells: list[str], used: int | None, load: int | None) -> Row:
    if used is None:
        raise ValueError("a reading before any header")
    amount = _number(cells[used])
    percent = None if load is None else _number(cells[load])
    return Row(
        number,
        moment(cells[0].strip()),
        DEVICE,
        used_bytes=None if amount is None else int(amount * MIB),
        utilization_ratio=None if percent is None or percent > 100 else percent / 100,
        gpu=0,
    )


def _number(cell: str) -> float | None:
    text = cell.strip()
    if text in ("", "-"):
        return None
    value = float(text)
    if not 0 <= value < 2**33:
        raise ValueError(f"{text[:40]!r}: expected a number")
    return value


def _names(line: str) -> list[str]:
    return [cell.strip().lower() for cell in line.split(",")]
