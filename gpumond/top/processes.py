"""Table of processes: sorted, filtered, with a stable cursor while the numbers change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from gpumond.model.units import human
from gpumond.top.rows import HOLDINGS, Key, ProcessRow

Sortable = tuple[bool, float, str]


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column. On a narrow screen those with the highest ``rank`` are hidden first. Numbers are right-aligned."""

    name: str
    width: int
    rank: int
    text: Callable[[ProcessRow], str]
    number: Callable[[ProcessRow], int | None] | None = None

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


RANKS = {"live": 3, "cached": 0, "stranded": 1, "overhead": 5, "opaque": 6}
PROGRAM = 14
COLUMNS = (
    TableColumn("gpu", 4, 0, lambda row: row.gpu, lambda row: int(row.gpu) if row.gpu.isdecimal() else None),
    TableColumn("pid", 7, 0, lambda row: str(row.pid), lambda row: row.pid),
    TableColumn("program", PROGRAM, 0, lambda row: f"{row.program} [{row.state}]" if row.state else row.program),
    TableColumn("user", 10, 7, lambda row: row.user),
    TableColumn("used", 10, 0, lambda row: _size(row.used_bytes), lambda row: row.used_bytes),
    *(_share(name, RANKS[name]) for name in HOLDINGS),
    TableColumn("verdict", 13, 2, lambda row: row.verdict),
)


@dataclass(frozen=True, slots=True)
class SortOrder:
    column: str = "used"
    reverse: bool = False
    """Sort against the column's default direction, which is largest first for numbers and from A for text."""

    def next(self, columns: Sequence[TableColumn]) -> SortOrder:
        names = [column.name for column in columns]
        at = names.index(self.column) if self.column in names else -1
        return SortOrder(names[(at + 1) % len(names)])


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


class Processes(DataTable[Text]):
    """The table. ``chosen`` is the process under the cursor; the cursor follows it when rows change places."""

    DEFAULT_CSS = "Processes { height: 1fr; min-height: 3; overflow-x: hidden; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "app.device(-1)", "GPU", key_display="←→"),  # rows do not scroll horizontally
        Binding("right", "app.device(1)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0, show_cursor=True)
        self.order = SortOrder()
        self.filter_text = ""
        self.rows_shown: list[ProcessRow] = []
        self._headers: list[tuple[str, int]] = []
        self._cells: list[list[tuple[str, bool]]] = []
        self._key: Key | None = None

    @property
    def chosen(self) -> ProcessRow | None:
        place = self.cursor_row
        return self.rows_shown[place] if 0 <= place < len(self.rows_shown) else None

    def show(self, rows: Iterable[ProcessRow], width: int) -> None:
        chosen, first = self.chosen, self.scroll_y
        self._key = chosen.key if chosen else self._key
        columns = fitting(width - 1)  # without the scroll bar
        spare = width - 1 - sum(column.width + 1 for column in columns)
        widths = [column.width + (min(spare, 30) if column.name == "program" else 0) for column in columns]
        self._head(columns, widths)
        self.rows_shown = arranged(rows, self.order, self.filter_text)
        self._fill(columns, widths)
        keys = [row.key for row in self.rows_shown]
        if self._key in keys:
            self.move_cursor(row=keys.index(self._key), animate=False, scroll=False)
        self.scroll_to(y=first, animate=False, force=True, immediate=True)

    def _head(self, columns: Sequence[TableColumn], widths: Sequence[int]) -> None:
        marks = {self.order.column: "↑" if self.order.reverse else "↓"}
        headers = [f"{column.name.upper()}{marks.get(column.name, '')}" for column in columns]
        if [*zip(headers, widths, strict=True)] == self._headers:
            return
        self._headers = [*zip(headers, widths, strict=True)]
        self._cells = []
        self.clear(columns=True)
        for header, column, width in zip(headers, columns, widths, strict=True):
            self.add_column(_aligned(header, True, column, width), width=width + 1)

    def _fill(self, columns: Sequence[TableColumn], widths: Sequence[int]) -> None:
        """Update the rows from the top. Only changed cells are written, as there may be hundreds of rows."""
        cells = [[(column.text(row), _bold(column, row)) for column in columns] for row in self.rows_shown]
        drawn = [*zip(columns, widths, strict=True)]
        for place in reversed(range(len(cells), len(self._cells))):
            self.remove_row(str(place))
        for place, (row, before) in enumerate(zip(cells, self._cells, strict=False)):
            for at, (cell, old) in enumerate(zip(row, before, strict=True)):
                if cell != old:
                    self.update_cell_at(Coordinate(place, at), _aligned(*cell, *drawn[at]))
        for place in range(len(self._cells), len(cells)):
            row = cells[place]
            self.add_row(*(_aligned(*cell, *each) for cell, each in zip(row, drawn, strict=True)), key=str(place))
        self._cells = cells


def _bold(column: TableColumn, row: ProcessRow) -> bool:
    return column.name == "verdict" and row.notable


def _aligned(text: str, bold: bool, column: TableColumn, width: int) -> Text:
    cell = Text(text, "bold" if bold else "")
    cell.truncate(width, overflow="ellipsis")
    cell.align("right" if column.number else "left", width)
    return cell
