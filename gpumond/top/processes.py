"""Table of processes: its columns, its order and its lines; their ancestors, and signals to those of this user."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpumond.facts.program import ProcessKey
from gpumond.host.files import replace_file
from gpumond.host.machine import (
    TICKS_PER_SECOND,
    find_process,
    parse_process_stat,
    read_head,
    read_process_stat,
    stat_fields,
)
from gpumond.view.rows import PROCESS_SHARES, HostStats, ProcessOnDevice, ProcessRow, pod_of
from gpumond.view.tables import share_cells
from gpumond.view.text import Span, StyledLine, bar, cut, pad, printable_excerpt, size_or_dash, width_of

FILTER_FIELDS: Mapping[str, Callable[[ProcessRow], object]] = {
    "gpu": lambda row: row.gpu,
    "pid": lambda row: row.pid,
    "program": lambda row: f"{row.program}\n{row.sources.process['comm'] or ''}",
    "user": lambda row: row.user,
    "container": lambda row: row.sources.process["container_name"],
    "pod": lambda row: pod_of(row.sources.process),
    "unit": lambda row: row.sources.process["unit"],
    "job": lambda row: row.sources.process["slurm_job"],
    "verdict": lambda row: row.verdict,
}
"""What a word can be limited to, by name."""
EXACT_FIELDS = ("gpu", "pid")
"""Fields that equal the text after the colon; the others contain it."""
FIELD_TERM = re.compile(r"(\w+):(.*)")


def matching_rows(rows: Iterable[ProcessRow], filter_text: str) -> list[ProcessRow]:
    """Return the rows that match all words: ``train`` in any text, ``user:root`` in one field, ``-train`` in none."""
    tests = [_word_test(word) for word in filter_text.lower().split()]
    return [row for row in rows if all(test(row) for test in tests)]


def _word_test(word: str) -> Callable[[ProcessRow], bool]:
    negated = len(word) > 1 and word.startswith("-")
    term = word.removeprefix("-") if negated else word
    found = FIELD_TERM.fullmatch(term)
    name, value = found.groups() if found else ("", "")

    def contains(row: ProcessRow) -> bool:
        if name not in FILTER_FIELDS:
            return term in row.search_text
        text = str(FILTER_FIELDS[name](row) or "").lower()
        if value and name in EXACT_FIELDS:
            return value in (text, text.rpartition(":")[2])
        return value in text

    return lambda row: contains(row) != negated


Number = TypeVar("Number", int, float)
Sortable = tuple[bool, float, str]


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column. On a narrow screen those with the highest ``hide_order`` are hidden first. Before those up to
    ``MAX_NARROWED`` are hidden, each is narrower by at most ``shrinkable``. Numbers are right-aligned.
    """

    name: str
    width: int
    hide_order: int
    text: Callable[[ProcessRow], str]
    number: Callable[[ProcessRow], float | None] | None = None
    shrinkable: int = 0

    def key(self, row: ProcessRow) -> Sortable:
        """Return the sort key. Unknown values come last when the largest are first."""
        if self.number is None:
            return True, 0.0, self.text(row).lower()
        value = self.number(row)
        return value is not None, float(value or 0), ""


def _share_column(name: str, order: int) -> TableColumn:
    return TableColumn(
        name, SIZE_WIDTH, order, lambda row: size_or_dash(row.shares[name]), lambda row: row.shares[name]
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _age_text(seconds: float) -> str:
    """Format an age in five columns: ``42s``, ``5m``, ``3h``, ``12d``."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _without_folder(command: str) -> str:
    program, space, arguments = command.partition(" ")
    return f"{program.rpartition('/')[2]}{space}{arguments}"


def _host_value(row: ProcessRow, name: str) -> float | None:
    return getattr(row.host, name) if row.host else None


def _gpu_index(gpu: str) -> int | None:
    """Return the index at the end of a GPU's label."""
    index = gpu.rpartition(":")[2]
    return int(index) if index.isdecimal() else None


MAX_NARROWED = 5
"""Order up to which columns are narrowed before one is hidden."""
HIDE_ORDERS = {"live": 5, "cached": 3, "stranded": 6, "overhead": 8, "opaque": 9}
SIZE_WIDTH = 9
"""Width of a size, such as `999.9 MiB`."""
PROGRAM_WIDTH = 14
EXTRA_VERDICT_WIDTH = 7
"""Columns that a verdict gets first of those that are left: `allocation-retries +1` fits."""
SHARES_COLUMN = "shares"
"""The column that shows the shares as a bar, and gives no order."""
COLUMNS = (
    TableColumn("gpu", 4, 0, lambda row: row.gpu, lambda row: _gpu_index(row.gpu), shrinkable=1),
    TableColumn("pid", 7, 2, lambda row: str(row.pid or ""), lambda row: row.pid),
    TableColumn("program", PROGRAM_WIDTH, 0, lambda row: row.program, shrinkable=4),
    TableColumn("user", 10, 7, lambda row: row.user),
    TableColumn("used", SIZE_WIDTH, 0, lambda row: size_or_dash(row.used_bytes), lambda row: row.used_bytes),
    TableColumn("waste", SIZE_WIDTH, 4, lambda row: size_or_dash(row.waste_bytes), lambda row: row.waste_bytes),
    TableColumn(SHARES_COLUMN, 12, 11, lambda row: ""),
    *(_share_column(name, HIDE_ORDERS[name]) for name in PROCESS_SHARES),
    TableColumn("busy", 5, 10, lambda row: _percent(row.busy_ratio), lambda row: row.busy_ratio),
    TableColumn("verdict", 14, 1, lambda row: row.status, shrinkable=1),
    TableColumn(
        "age",
        6,
        12,
        lambda row: (row.host and _age_text(row.host.age_seconds)) or "",
        lambda row: _host_value(row, "age_seconds"),
    ),
    TableColumn(
        "cpu", 5, 14, lambda row: _percent(_host_value(row, "cpu_ratio")), lambda row: _host_value(row, "cpu_ratio")
    ),
    TableColumn(
        "host",
        SIZE_WIDTH,
        15,
        lambda row: size_or_dash(row.host and row.host.resident_bytes),
        lambda row: _host_value(row, "resident_bytes"),
    ),
    TableColumn("command", 16, 13, lambda row: _without_folder(row.host.command) if row.host else ""),
)
TOTAL_SHRINKABLE = sum(column.shrinkable for column in COLUMNS)
HIDEABLE = ("waste", *PROCESS_SHARES, "user", "busy", "age", "cpu", "host", "command")
"""Columns that are hidden while no row has a value other than 0; that of the user while there is only one."""


def column_names(text: str) -> tuple[str, ...]:
    """Return the names in a text such as ``gpu,used,command``. Raises ValueError."""
    known, found = [column.name for column in COLUMNS], [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in found if name not in known]:
        raise ValueError(f"unknown column {unknown[0]!r:.40}; columns: {', '.join(known)}")
    return tuple(found)


def saved_columns() -> Sequence[str]:
    """Return the names of the columns that were last chosen; none without a file that this version can read."""
    with suppress(OSError, ValueError):
        return column_names(_columns_file().read_text())
    return ()


def save_columns(columns: Sequence[str]) -> str:
    """Keep the columns for the next start. Return why that failed; empty if it did not."""
    try:
        _columns_file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(_columns_file(), ",".join(columns).encode())
    except OSError as error:
        return f"not saved for the next start: {_columns_file()}: {error.strerror}"
    return ""


def _columns_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gpumond" / "top-columns"


@dataclass(frozen=True, slots=True)
class SortOrder:
    column: str = "used"
    reverse: bool = False
    """Sort against the column's default direction, which is largest first for numbers and from A for text."""

    def next(self, columns: Sequence[TableColumn], step: int = 1) -> SortOrder:
        names = [column.name for column in columns if column.name != SHARES_COLUMN]
        at = names.index(self.column) if self.column in names else -1
        return SortOrder(names[(at + step) % len(names)])

    def sorted_by(self, column: str) -> SortOrder:
        """Return the order by a column; the reverse one if it is by that column already."""
        if column == SHARES_COLUMN:
            return self
        return SortOrder(column, column == self.column and not self.reverse)


def empty_columns(rows: Sequence[ProcessRow]) -> set[str]:
    """Return the names of the columns of `HIDEABLE` that say nothing; none without a row."""
    if not rows:
        return set()
    alone = {"user"} if len({row.user for row in rows}) == 1 else set()
    return alone | {
        column.name
        for column in COLUMNS
        if column.name in HIDEABLE
        and not any(column.number(row) if column.number else column.text(row) for row in rows)
    }


def columns_for_width(width: int, without: Collection[str] = ()) -> list[TableColumn]:
    """Return the columns that fit on a screen of that width, in their order, except those ``without``."""
    fitting = {column.name for column in COLUMNS if column.name not in without}
    for column in sorted(COLUMNS, key=lambda column: -column.hide_order):
        if (
            column.name in fitting
            and column.hide_order
            and sum(each.width + 1 for each in COLUMNS if each.name in fitting)
            > width
            + (column.hide_order <= MAX_NARROWED) * (TOTAL_SHRINKABLE + 1)  # the last column needs no space after it
        ):
            fitting.remove(column.name)
    return [column for column in COLUMNS if column.name in fitting]


def sort_and_filter(rows: Iterable[ProcessRow], order: SortOrder, filter_text: str) -> list[ProcessRow]:
    """Return the sorted rows that match the filter. Equal rows are ordered by pid."""
    found = matching_rows(rows, filter_text)
    column = next(column for column in COLUMNS if column.name == order.column)
    found.sort(key=lambda row: (row.pid, row.key[0]))
    found.sort(key=column.key, reverse=(column.number is not None) != order.reverse)
    return found


def lay_out_columns(
    width: int, rows: Iterable[ProcessRow], names: Collection[str] = (), filled: Collection[str] = ()
) -> list[TableColumn]:
    """Return the columns of a line of that width, in their final widths. A GPU's label is shown completely.

    ``names``: the columns to show if they fit; none for those that have a value, or are in ``filled``.
    """
    shown = [*rows]
    extra_gpu_width = max(0, max((len(row.gpu) for row in shown), default=0) - COLUMNS[0].width)
    without = {column.name for column in COLUMNS} - {"program", *names} if names else empty_columns(shown) - {*filled}
    columns = columns_for_width(width - 1 - extra_gpu_width, without)
    free = width - 1 - extra_gpu_width - sum(column.width + 1 for column in columns)
    has_command = columns[-1].name == "command"
    verdict = min(max(0, free), EXTRA_VERDICT_WIDTH) if any(column.name == "verdict" for column in columns) else 0
    program = min(max(0, free - verdict), 10 if has_command else 30)
    change = {"verdict": verdict, "program": program, "command": free - verdict - program if has_command else 0}
    missing = min(0, free + 1)
    for column in columns:
        if missing:
            change[column.name] = max(missing, -column.shrinkable)
            missing -= change[column.name]
    change["gpu"] = change.get("gpu", 0) + extra_gpu_width
    return [replace(column, width=column.width + change.get(column.name, 0)) for column in columns]


def table_rows(
    rows: Iterable[ProcessRow],
    order: SortOrder,
    filter_text: str,
    grouping: str,
    open_groups: Collection[ProcessOnDevice],
    ancestors: AncestorsByProcess,
) -> Iterator[TableRow]:
    """Yield the rows in their order. ``grouping``: a key of ``GROUPINGS``, ``tree`` or empty.

    The members of a group follow it if its key is in ``open_groups``.
    """
    listed = sort_and_filter(rows, order, filter_text)
    if grouping == "tree":
        yield from tree_rows(listed, ancestors)
    elif grouping:
        groups = {group.key: group for group in group_rows(listed, grouping)}
        for row in sort_and_filter((group.process for group in groups.values()), order, ""):
            yield groups[row.key]
            if row.key in open_groups:
                yield from (TableRow(member, 1) for member in groups[row.key].members)
    else:
        yield from map(TableRow, listed)


def table_head(columns: Sequence[TableColumn], order: SortOrder, count: str = "", grouping: str = "") -> StyledLine:
    """Return the line of the column names, with an arrow for the order.

    ``count``: rows that are visible, of all. ``grouping``: the property by which the rows are grouped.
    """
    arrow = "↑" if order.reverse else "↓"
    cells = []
    for column in columns:
        is_program = column.name == "program"
        name = f"by {grouping}" if grouping and is_program else column.name
        name = f"{name.upper()}{arrow if column.name == order.column else ''}"
        end = f" {count}" if count and is_program else ""
        cells.append(pad(cut(name, column.width - len(end)) + end, column.width, bool(column.number)))
    return [Span(" " + " ".join(cells), "head")]


def table_line(
    row: TableRow, columns: Sequence[TableColumn], width: int, marked: bool, is_selected: bool, shares: StyledLine
) -> StyledLine:
    """Return the line of one row: a mark, then the columns. ``shares``: the bar."""
    style = "chosen" if is_selected else row.process.level or ("bold" if row.members else "")
    line, text = StyledLine(), "*" if marked else " "
    for column in columns:
        if column.name == SHARES_COLUMN:
            line, text = [*line, Span(text, style), *shares], " "
        else:
            text += f"{pad(_cell_text(column, row), column.width, bool(column.number))} "
    return [*line, Span(pad(text.removesuffix(" "), width - width_of(line)), style)]


def share_bar(row: ProcessRow, largest: int, width: int, monochrome: bool) -> StyledLine:
    """Return the shares of a process as a bar. ``largest``: bytes of a bar of full length."""
    cells = bar({share: size for share, size in row.shares.items() if size}, largest, width)
    return [Span(" " * count) if part == "free" else share_cells(part, count, monochrome) for part, count in cells]


def _cell_text(column: TableColumn, row: TableRow) -> str:
    text = row.process.status_in(column.width) if column.name == "verdict" else column.text(row.process)
    return f"{'  ' * row.depth}{text}" if column.name == "program" else text


def column_at(columns: Sequence[TableColumn], x: int) -> TableColumn | None:
    """Return the column at a place of the line, None outside of the columns."""
    end = 1
    for column in columns:
        end += column.width + 1
        if x < end:
            return column
    return None


TREE = "tree"


class ProcessList:
    """``grouping`` is a key of ``GROUPINGS``, ``TREE`` or empty. The cursor follows its row when rows change places.

    ``columns``: names of those to show, see `columns_in`.
    """

    def __init__(self, monochrome: bool = False, columns: Collection[str] = ()) -> None:
        self.monochrome, self.columns = monochrome, columns
        self.order = SortOrder()
        self.filter_text = ""
        self.grouping = ""
        self.open_groups: set[ProcessOnDevice] = set()
        self.marks: set[ProcessOnDevice] = set()
        self.rows: list[TableRow] = []
        self.first_visible = 0
        self._cursor = 0
        self._key: ProcessOnDevice | None = None
        self._ever_filled: set[str] = set()
        """Columns that have had a value: they stay, or the table would move each second."""

    @property
    def selected_row(self) -> TableRow | None:
        """Return the row under the cursor."""
        return self.rows[self._cursor] if self._cursor < len(self.rows) else None

    def fill(self, rows: Iterable[ProcessRow], ancestors: AncestorsByProcess) -> None:
        """Replace the rows."""
        self.rows = [*table_rows(rows, self.order, self.filter_text, self.grouping, self.open_groups, ancestors)]
        if self.rows:
            self._ever_filled |= {*HIDEABLE} - empty_columns([row.process for row in self.rows])
        keys = [row.key for row in self.rows]
        if self._key in keys:
            self._cursor = keys.index(self._key)
        self.move(0)

    def columns_in(self, width: int) -> list[TableColumn]:
        """Return the columns of a line of that width."""
        return lay_out_columns(width, (row.process for row in self.rows), self.columns, self._ever_filled)

    def move(self, rows: int) -> None:
        self.select(self._cursor + rows)

    def select(self, index: int) -> None:
        """Move the cursor to a row, or to the nearest that exists."""
        self._cursor = max(0, min(index, len(self.rows) - 1))
        row = self.selected_row
        self._key = row.key if row else self._key

    def next_grouping(self) -> None:
        """Select the next grouping."""
        groupings = ["", *GROUPINGS]
        at = groupings.index(self.grouping) if self.grouping in groupings else 0
        self.grouping = groupings[(at + 1) % len(groupings)]

    def toggle_group(self, row: TableRow) -> None:
        """Show the members of a group, or hide them."""
        self.open_groups ^= {row.key}

    def toggle_marks(self, row: TableRow) -> None:
        """Mark the processes of a row; unmark them if all are marked."""
        keys = {process.key for process in row.processes}
        self.marks = self.marks - keys if keys <= self.marks else self.marks | keys

    def lines(self, width: int, height: int) -> list[StyledLine]:
        """Return the head and the rows that fit below it, among them the one under the cursor."""
        count = max(1, height - 1)
        self.first_visible = max(0, min(self.first_visible, len(self.rows) - count))
        self.first_visible = min(max(self.first_visible, self._cursor - count + 1), self._cursor)
        columns = self.columns_in(width)
        room = next((column.width for column in columns if column.name == SHARES_COLUMN), 0)
        largest = max((row.process.used_bytes or 0 for row in self.rows), default=0)
        visible = self.rows[self.first_visible : self.first_visible + count]
        shown = f"{len(visible)}/{len(self.rows)}" if len(self.rows) > count else ""
        found = [table_head(columns, self.order, shown, self.grouping if self.grouping in GROUPINGS else "")]
        for index, row in enumerate(visible, self.first_visible):
            marked = all(process.key in self.marks for process in row.processes)
            shares = share_bar(row.process, largest, room, self.monochrome)
            found.append(table_line(row, columns, width, marked, index == self._cursor, shares))
        if not self.rows and self.filter_text:
            found.append([Span(" no process matches the filter", "dim")])
        return found[:height]


GROUPINGS: Mapping[str, Callable[[ProcessRow], str]] = {
    "user": lambda row: row.user or "unknown user",
    "workload": lambda row: row.program,
    "container": lambda row: row.container or "no container",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row. ``process`` contains the sums of the ``members`` of a group; other rows have no members.

    ``depth`` is the number of ancestors that have a row.
    """

    process: ProcessRow
    depth: int = 0
    members: tuple[ProcessRow, ...] = ()

    @property
    def key(self) -> ProcessOnDevice:
        return self.process.key

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        return self.members or (self.process,)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process on this machine that is not in the table."""

    pid: int
    name: str


AncestorsByProcess = Mapping[ProcessKey, Sequence[Ancestor]]
"""The ancestors of each process, its parent first; empty where they are unknown."""


def group_rows(rows: Iterable[ProcessRow], grouping: str) -> list[TableRow]:
    """Return a row for each group. ``grouping`` is a key of ``GROUPINGS``."""
    groups: dict[str, list[ProcessRow]] = {}
    for row in rows:
        groups.setdefault(GROUPINGS[grouping](row), []).append(row)
    return [
        TableRow(_group_sum(f"{grouping} {name}", f"{name} ({len(members)})", members), 0, tuple(members))
        for name, members in groups.items()
    ]


def _group_sum(key: str, name: str, members: Sequence[ProcessRow]) -> ProcessRow:
    """Return one row for several processes. The sum of values that are all unknown is unknown."""
    first = members[0]
    notable = [row for row in members if row.is_notable]
    verdict = _common_value(
        {row.status for row in notable or members if row.status}, f"{len(notable)} affected" if notable else ""
    )
    return replace(
        first,
        key=(key, ProcessKey(0, None)),
        gpu=_common_value((row.gpu for row in members), "*"),
        pid=0,
        program=name,
        user=_common_value((row.user for row in members), ""),
        container=_common_value((row.container for row in members), ""),
        busy_ratio=_total(row.busy_ratio for row in members),
        used_bytes=_total(row.used_bytes for row in members),
        shares={share: _total(row.shares[share] for row in members) for share in PROCESS_SHARES},
        host=None,
        verdict=verdict,
        status=verdict,
        other_problems=0,
        level="bad" if any(row.level == "bad" for row in notable) else "warn" if notable else "",
        state="",
    )


def _common_value(values: Iterable[str], otherwise: str) -> str:
    found = set(values)
    return found.pop() if len(found) == 1 else otherwise


def _total(values: Iterable[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def tree_rows(rows: Sequence[ProcessRow], ancestors: AncestorsByProcess) -> list[TableRow]:
    """Return the rows with children below their parents. Siblings keep their order.

    A parent without memory on a device has a row if it has several children in the table.
    """
    by_pid: dict[int, ProcessRow] = {}
    for row in rows:
        if ancestors.get(row.key[1]):
            by_pid.setdefault(row.pid, row)
    children: dict[int, list[ProcessRow]] = {}
    names: dict[int, str] = {}
    for row in rows:
        parent = _parent(row, ancestors, by_pid)
        if parent is not None:
            children.setdefault(parent.pid, []).append(row)
            names[parent.pid] = parent.name
    pids_with_subtree = {pid for pid, members in children.items() if pid in by_pid or len(members) > 1}
    return list(_walk(rows, children, by_pid, pids_with_subtree, names))


def _parent(row: ProcessRow, ancestors: AncestorsByProcess, by_pid: Mapping[int, ProcessRow]) -> Ancestor | None:
    """Return the nearest ancestor in the table, else the parent."""
    lineage = ancestors.get(row.key[1], ())
    listed = next((each for each in lineage if each.pid in by_pid), None)
    return listed or next((each for each in lineage if each.pid > 1), None)


def _walk(
    rows: Sequence[ProcessRow],
    children: Mapping[int, Sequence[ProcessRow]],
    by_pid: Mapping[int, ProcessRow],
    pids_with_subtree: Collection[int],
    names: Mapping[int, str],
) -> Iterator[TableRow]:
    parent_of = {row.key: pid for pid in pids_with_subtree for row in children[pid]}
    done: set[int] = set()

    def below(row: ProcessRow, depth: int) -> Iterator[TableRow]:
        yield TableRow(row, depth)
        if by_pid.get(row.pid) is row and row.pid in pids_with_subtree:
            for child in children[row.pid]:
                yield from below(child, depth + 1)

    for row in rows:
        parent = parent_of.get(row.key)
        if parent is None:
            yield from below(row, 0)
        elif parent not in by_pid and parent not in done:
            done.add(parent)
            members = children[parent]
            head = replace(_group_sum(f"parent {parent}", names[parent], members), pid=parent)
            yield TableRow(head, 0, tuple(members))
            for child in members:
                yield from below(child, 1)


PROC = "/proc"
MAX_ANCESTORS = 20
STATS_SECONDS = 1.0
COMMAND_BYTES = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT")


class AncestorCache:
    """Ancestors of processes. They are read once for each process."""

    def __init__(self) -> None:
        self._cached: dict[ProcessKey, tuple[Ancestor, ...]] = {}

    def read(self, processes: Iterable[ProcessKey]) -> Mapping[ProcessKey, tuple[Ancestor, ...]]:
        """Return the ancestors of each process, the parent first; none of a process of another machine."""
        self._cached = {key: self._cached[key] if key in self._cached else _ancestors(key) for key in processes}
        return self._cached


class ProcessStats:
    """Command lines, ages, host memory and processor time of processes, read at most once a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cached: dict[ProcessKey, tuple[float, int, HostStats]] = {}
        """By process: the time of the reading, its processor time in ticks, and what is shown."""

    def read(self, processes: Iterable[ProcessKey]) -> Mapping[ProcessKey, HostStats]:
        """Return what is known of each process; nothing of one of another machine."""
        now, fresh = self._clock(), {}
        for key in processes:
            before = self._cached.get(key)
            found = before if before and now - before[0] < STATS_SECONDS else _read_stats(key, before, now)
            if found:
                fresh[key] = found
        self._cached = fresh
        return {key: facts for key, (_, _, facts) in fresh.items()}


def _read_stats(
    key: ProcessKey, before: tuple[float, int, HostStats] | None, now: float
) -> tuple[float, int, HostStats] | None:
    try:
        fields = stat_fields(read_head(f"{PROC}/{key.pid}/stat"))
        if parse_process_stat(fields).start_ticks != key.start_ticks:
            return None
        uptime = float(read_head(f"{PROC}/uptime").split()[0])
        command = before[2].command if before else _command(key.pid)
        cpu_ticks = int(fields[11]) + int(fields[12])
        resident = int(read_head(f"{PROC}/{key.pid}/statm").split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
    cpu = (cpu_ticks - before[1]) / TICKS_PER_SECOND / (now - before[0]) if before else None
    age = uptime - parse_process_stat(fields).start_ticks / TICKS_PER_SECOND
    return now, cpu_ticks, HostStats(command, max(0.0, age), resident, cpu)


def _command(pid: int) -> str:
    return printable_excerpt(
        read_head(f"{PROC}/{pid}/cmdline", COMMAND_BYTES).replace(b"\0", b" ").decode(errors="replace").strip(), 200
    )


def _ancestors(key: ProcessKey) -> tuple[Ancestor, ...]:
    stat = read_process_stat(PROC, key.pid)
    if stat is None or stat.start_ticks != key.start_ticks:
        return ()
    found: list[Ancestor] = []
    while stat is not None and stat.parent > 0 and len(found) < MAX_ANCESTORS:
        found.append(Ancestor(stat.parent, _name(stat.parent)))
        stat = read_process_stat(PROC, stat.parent)
    return tuple(found)


def _name(pid: int) -> str:
    try:
        return printable_excerpt(read_head(f"{PROC}/{pid}/comm").decode(errors="replace").strip(), 40)
    except OSError:
        return "?"


def signal_refusal(row: ProcessRow, local: bool) -> str:
    """Return why a process receives no signal from here; empty if it may.

    ``local``: its daemon may be on this machine.
    """
    found = find_process(row.pid) if local else None
    if found is None or found[0] != row.key[1]:
        return "the program runs on another machine or in another PID namespace"
    return "" if found[1] == os.geteuid() else "the program isn't yours"


def send_signal(row: ProcessRow, local: bool, name: str) -> str:
    """Send a signal to a process and return the result. No other process receives it, even if the pid is reused."""
    try:
        process = os.pidfd_open(row.pid)
    except OSError as error:
        return f"not sent: {error.strerror}"
    try:
        if reason := signal_refusal(row, local):  # of the process that the descriptor refers to
            return f"not sent: {reason}"
        signal.pidfd_send_signal(process, signal.Signals[name])
    except OSError as error:
        return f"not sent: {error.strerror}"
    finally:
        os.close(process)
    return f"{name} sent"
