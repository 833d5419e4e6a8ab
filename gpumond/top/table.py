"""State of the table of processes: order, filter, groups, marks, and the cursor. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from gpumond.top.groups import GROUPINGS, Lineage, TableRow
from gpumond.top.lines import Line, Piece
from gpumond.top.processes import SortOrder, laid_out, table_head, table_line, table_rows
from gpumond.top.rows import ProcessLife, ProcessRow

TREE = "tree"


class Table:
    """``by`` is a grouping, ``TREE`` or empty. The cursor follows its row when rows change places."""

    def __init__(self) -> None:
        self.order = SortOrder()
        self.words = ""
        self.by = ""
        self.opened: set[ProcessLife] = set()
        self.marks: set[ProcessLife] = set()
        self.rows: list[TableRow] = []
        self.first = 0
        self._cursor = 0
        self._key: ProcessLife | None = None

    @property
    def chosen(self) -> TableRow | None:
        """Return the row under the cursor."""
        return self.rows[self._cursor] if self._cursor < len(self.rows) else None

    def fill(self, rows: Iterable[ProcessRow], lineage: Lineage) -> None:
        """Replace the rows."""
        self.rows = [*table_rows(rows, self.order, self.words, self.by, self.opened, lineage)]
        keys = [row.key for row in self.rows]
        if self._key in keys:
            self._cursor = keys.index(self._key)
        self.move(0)

    def move(self, rows: int) -> None:
        self.select(self._cursor + rows)

    def select(self, place: int) -> None:
        """Move the cursor to a row, or to the nearest that exists."""
        self._cursor = max(0, min(place, len(self.rows) - 1))
        chosen = self.chosen
        self._key = chosen.key if chosen else self._key

    def group(self) -> None:
        """Select the next grouping."""
        groupings = ["", *GROUPINGS]
        at = groupings.index(self.by) if self.by in groupings else 0
        self.by = groupings[(at + 1) % len(groupings)]

    def open(self, row: TableRow) -> None:
        """Show the members of a group, or hide them."""
        self.opened ^= {row.key}

    def mark(self, row: TableRow) -> None:
        """Mark the processes of a row; unmark them if all are marked."""
        keys = {process.key for process in row.processes}
        self.marks = self.marks - keys if keys <= self.marks else self.marks | keys

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the head and the rows that fit below it, among them the one under the cursor."""
        count = max(1, height - 1)
        self.first = max(0, min(self.first, len(self.rows) - count))
        self.first = min(max(self.first, self._cursor - count + 1), self._cursor)
        columns = laid_out(width, (row.process for row in self.rows))
        visible = self.rows[self.first : self.first + count]
        found = [table_head(columns, self.order)]
        for place, row in enumerate(visible, self.first):
            marked = all(process.key in self.marks for process in row.processes)
            found.append(table_line(row, columns, width, marked, place == self._cursor))
        if not self.rows and self.words:
            found.append([Piece(" no process matches the filter", "dim")])
        return found[:height]
