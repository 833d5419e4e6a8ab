"""Changes between two frames, as ``/api/v1/live`` sends them. Performs no I/O.

A frame consists of tables, whose rows have keys, and of other values. Changes contain the other values that differ and,
for each table that differs, its rows and the cells whose values differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypedDict

from gpumond.model.cooperative import Steps
from gpumond.model.whole_frame import WholeFrame

PROCESS = ("pid", "start_ticks")
TABLES = {
    "snapshot.devices": ("uuid",),
    "snapshot.reports": PROCESS,
    "ledger.lines": ("device_uuid", "share", "workload", *PROCESS),
    "processes": ("device_uuid", *PROCESS),
    "verdicts": ("device_uuid", "kind", *PROCESS),
    "alerts": ("rule", "labels", *PROCESS),
}
"""The fields that identify a row of each table, by the path of the table in a frame."""
TENTHS = ("age_seconds", "idle_seconds")
"""Fields whose changes are sent in tenths of a second: they would otherwise change in each frame."""
PARTS = ("snapshot", "ledger")
"""Parts of a frame whose fields are compared one by one."""


class TableChanges(TypedDict, total=False):
    """``rows``: for each row now its place before, -1 for a new one; absent if the rows and their order are the same.
    ``added``: the new rows. ``cells``: by field, the places of the rows now and their values.
    """

    rows: list[int]
    added: list[Any]
    cells: dict[str, tuple[list[int], list[Any]]]


@dataclass(frozen=True, slots=True)
class FrameChanges:
    """``values``: by path, the values that are in no table. ``tables``: by path."""

    values: dict[str, Any]
    tables: dict[str, TableChanges]


def live_frame(whole: WholeFrame) -> WholeFrame:
    """Return a frame without the driver's lists of processes, whose values are in ``processes``."""
    devices = (
        device if device.processes is None else replace(device, processes=()) for device in whole.snapshot.devices
    )
    return replace(whole, snapshot=replace(whole.snapshot, devices=tuple(devices)))


def changes(before: WholeFrame, after: WholeFrame) -> Steps[FrameChanges]:
    """Return what makes ``after`` of ``before``. A step ends after each table."""
    values: dict[str, Any] = {}
    for part in ("", *PARTS):
        old, new = (attrgetter(part)(frame) if part else frame for frame in (before, after))
        for field in fields(new):
            path = f"{part}.{field.name}" if part else field.name
            value = getattr(new, field.name)
            if path not in TABLES and path not in PARTS and value != getattr(old, field.name):
                values[path] = value
    tables: dict[str, TableChanges] = {}
    for path, key in TABLES.items():
        yield
        if found := _of_table(attrgetter(path)(before), attrgetter(path)(after), attrgetter(*key)):
            tables[path] = found
    return FrameChanges(values, tables)


def _of_table(before: Sequence[Any], after: Sequence[Any], key: Callable[[Any], Any]) -> TableChanges:
    places = {key(row): place for place, row in enumerate(before)}
    rows = [places.get(key(row), -1) for row in after]
    if len(places) < len(before) or len(set(rows) - {-1}) < len(rows) - rows.count(-1):  # a key occurs twice
        rows = [-1] * len(after)
    found = TableChanges()
    if rows != list(range(len(before))):
        found["rows"] = rows
        found["added"] = [row for row, place in zip(after, rows, strict=True) if place < 0]
    cells: dict[str, tuple[list[int], list[Any]]] = {}
    values: Callable[[Any], tuple[Any, ...]] | None = None
    for now, (row, place) in enumerate(zip(after, rows, strict=True)):
        if place < 0 or row is before[place]:
            continue
        if values is None:
            names = [field.name for field in fields(row)]
            values = attrgetter(*names)
        old, new = values(before[place]), values(row)
        if old == new:
            continue
        for name, was, value in zip(names, old, new, strict=True):
            if name in TENTHS and was is not None and value is not None:
                was, value = round(was, 1), round(value, 1)
            if was != value:
                changed = cells.setdefault(name, ([], []))
                changed[0].append(now)
                changed[1].append(value)
    if cells:
        found["cells"] = cells
    return found
