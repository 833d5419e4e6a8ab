"""The default table of ``nvidia-smi``, repeated (``nvidia-smi -l N``): devices and, where listed, their processes.

The processes of a device are unknown until its table lists one, because a container hides those of others. Processes
without an amount of memory are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import MIB
from gpumond.features.recordings.snapshots import Remarks, Row, label

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_DATE = re.compile(rf"\w{{3}} ({'|'.join(MONTHS)}) +(\d{{1,2}}) (\d\d):(\d\d):(\d\d) (\d{{4}})")
_START = re.compile(r"\| NVIDIA-SMI ")
_DEVICE = re.compile(r"\|\s+(\d{1,4})\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:\S+)\s")
_MEMORY = re.compile(r"\|[^|]*\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|\s*(?:(\d{1,2}|100)%|N/A|ERR!)")
_PROCESS = re.compile(
    r"\|\s+(\d{1,4})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?([1-9]\d{0,9})\s+[A-Z+]+\s+(\S.*?)\s+(\d{1,9})MiB\s*\|"
)


class Device(NamedTuple):
    gpu: int
    name: str
    bus: str


def starts(line: str) -> bool:
    """Return whether a log with this first line consists of tables."""
    return line.startswith("+--") or _START.match(line) is not None or _DATE.match(line) is not None


def rows(numbered: Iterable[tuple[int, str]], remarks: Remarks, interval: float | None) -> Iterator[Row]:
    """Yield the rows of all tables. ``interval``: seconds between two tables without a date. Raises ConfigError."""
    at: float | None = None
    tables = 0
    device: Device | None = None
    buses: dict[int, str] = {}
    for number, line in numbered:
        if match := _DATE.match(line):
            at = _date(match)
        elif _START.match(line):
            at = interval * tables if at is None and interval is not None else at
            if at is None:
                raise ConfigError(
                    f"{remarks.name}, line {number}: a table without a date before it; pass the seconds between two"
                    " tables with --interval N"
                )
            started, at, device = at, None, None
            tables += 1
        elif not tables:
            continue
        elif match := _DEVICE.match(line):
            device = Device(int(match[1]), label(match[2]), label(match[3]))
            buses[device.gpu] = device.bus
        elif device is not None and (match := _MEMORY.match(line)):
            load = int(match[3]) / 100 if match[3] else None
            used, size = int(match[1]) * MIB, int(match[2]) * MIB
            remarks.rows += 1
            yield Row(number, started, device.bus, None, used, size, None, None, load, device.gpu, device.name)
            device = None
        elif (match := _PROCESS.match(line)) and int(match[1]) in buses:
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
        raise ConfigError(f"{match[0]!r} is not a time: {error}") from None
