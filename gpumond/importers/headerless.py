"""Inference of the columns of an nvidia-smi log without a header, if they are unambiguous."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from gpumond.errors import ConfigError
from gpumond.model.units import MIB

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
