"""Table of processes: its columns, its order and its lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpumond.model.units import human
from gpumond.top.groups import Lineage, TableRow, grouped, single, tree
from gpumond.top.lines import Line, Piece, fitted
from gpumond.top.rows import HOLDINGS, ProcessLife, ProcessRow

Sortable = tuple[bool, float, str]


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column. On a narrow screen those with the highest ``rank`` are hidden first. Numbers are right-aligned."""

    name: str
    width: int
    rank: int
    text: Callable[[ProcessRow], str]
    number: Callable[[ProcessRow], float | None] | None = None

    def key(self, row: ProcessRow) -> Sortable:
        """Return the sort key. Unknown values come last when the largest are first."""
        if self.number is None:
            return True, 0.0, self.text(row).lower()
        value = self.number(row)
        return value is not None, float(value or 0), ""


def _share(name: str, rank: int) -> TableColumn:
    return TableColumn(name, 10, rank, lambda row: _size(row.shares[name]), lambda row: row.shares[name])


def _size(value: int | None) -> str:
    return "-" if value is None else human(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _index(gpu: str) -> int | None:
    """Return the index at the end of a GPU's label."""
    index = gpu.rpartition(":")[2]
    return int(index) if index.isdecimal() else None


RANKS = {"live": 3, "cached": 0, "stranded": 1, "overhead": 5, "opaque": 6}
PROGRAM = 14
COLUMNS = (
    TableColumn("gpu", 4, 0, lambda row: row.gpu, lambda row: _index(row.gpu)),
    TableColumn("pid", 7, 0, lambda row: str(row.pid or ""), lambda row: row.pid),
    TableColumn("program", PROGRAM, 0, lambda row: f"{row.program} [{row.state}]" if row.state else row.program),
    TableColumn("user", 10, 7, lambda row: row.user),
    TableColumn("used", 10, 0, lambda row: _size(row.used_bytes), lambda row: row.used_bytes),
    *(_share(name, RANKS[name]) for name in HOLDINGS),
    TableColumn("busy", 5, 8, lambda row: _ratio(row.busy_ratio), lambda row: row.busy_ratio),
    TableColumn("verdict", 13, 2, lambda row: row.verdict),
)


@dataclass(frozen=True, slots=True)
class SortOrder:
    column: str = "used"
    reverse: bool = False
    """Sort against the column's default direction, which is largest first for numbers and from A for text."""

    def next(self, columns: Sequence[TableColumn], step: int = 1) -> SortOrder:
        names = [column.name for column in columns]
        at = names.index(self.column) if self.column in names else -1
        return SortOrder(names[(at + step) % len(names)])

    def by(self, column: str) -> SortOrder:
        """Return the order by a column; the reverse one if it is by that column already."""
        return SortOrder(column, column == self.column and not self.reverse)


def fitting(width: int) -> list[TableColumn]:
    """Return the columns that fit on a screen of that width, in their order."""
    chosen = {column.name for column in COLUMNS}
    for column in sorted(COLUMNS, key=lambda column: -column.rank):
        if column.rank and sum(each.width + 1 for each in COLUMNS if each.name in chosen) > width:
            chosen.remove(column.name)
    return [column for column in COLUMNS if column.name in chosen]


def arranged(rows: Iterable[ProcessRow], order: SortOrder, words: str) -> list[ProcessRow]:
    """Return the sorted rows that contain every word of the filter. Equal rows are ordered by pid."""
    matching = [row for row in rows if all(word in row.words for word in words.lower().split())]
    column = next(column for column in COLUMNS if column.name == order.column)
    matching.sort(key=lambda row: (row.pid, row.key[0]))
    matching.sort(key=column.key, reverse=(column.number is not None) != order.reverse)
    return matching


def laid_out(width: int, rows: Iterable[ProcessRow]) -> list[TableColumn]:
    """Return the columns of a line of that width, in their final widths. A GPU's label is shown completely."""
    longest = max((len(row.gpu) for row in rows), default=0)
    more = max(0, longest - COLUMNS[0].width)
    columns = fitting(width - 1 - more)
    spare = max(0, width - 1 - more - sum(column.width + 1 for column in columns))
    wider = {"gpu": more, "program": min(spare, 30)}
    return [replace(column, width=column.width + wider.get(column.name, 0)) for column in columns]


def table_rows(
    rows: Iterable[ProcessRow],
    order: SortOrder,
    words: str,
    by: str,
    opened: Collection[ProcessLife],
    lineage: Lineage,
) -> Iterator[TableRow]:
    """Yield the rows in their order. ``by``: a grouping, ``tree`` or empty.

    The members of a group follow it if its key is in ``opened``.
    """
    matching = arranged(rows, order, words)
    if by == "tree":
        yield from tree(matching, lineage)
    elif by:
        groups = {group.key: group for group in grouped(matching, by)}
        for row in arranged((group.process for group in groups.values()), order, ""):
            yield groups[row.key]
            if row.key in opened:
                yield from (TableRow(member, 1) for member in groups[row.key].members)
    else:
        yield from single(matching)


def table_head(columns: Sequence[TableColumn], order: SortOrder) -> Line:
    """Return the line of the column names, with an arrow for the order."""
    arrow = "↑" if order.reverse else "↓"
    names = [f"{column.name.upper()}{arrow if column.name == order.column else ''}" for column in columns]
    cells = [fitted(name, column.width, bool(column.number)) for name, column in zip(names, columns, strict=True)]
    return [Piece(" " + " ".join(cells), "head")]


def table_line(row: TableRow, columns: Sequence[TableColumn], width: int, marked: bool, chosen: bool) -> Line:
    """Return the line of one row: a mark, then the columns."""
    cells = [fitted(_text(column, row), column.width, bool(column.number)) for column in columns]
    text = fitted(("*" if marked else " ") + " ".join(cells), width)
    bold = bool(row.members) or row.process.notable
    return [Piece(text, "chosen" if chosen else "bold" if bold else "")]


def _text(column: TableColumn, row: TableRow) -> str:
    text = column.text(row.process)
    return f"{'  ' * row.depth}{text}" if column.name == "program" else text


def column_at(columns: Sequence[TableColumn], place: int) -> TableColumn | None:
    """Return the column at a place of the line, None outside of the columns."""
    end = 1
    for column in columns:
        end += column.width + 1
        if place < end:
            return column
    return None
