"""The rows of a log in order of time, on a monotonic clock.

Logs may contain lines out of order, gaps, clock changes, and one file appended to another. Rows within
a few seconds of each other are sorted. A jump, backwards or far ahead, is accepted when a series
continues from there; a single row out of order is ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from gpumond.errors import ConfigError
from gpumond.importers.rows import Remarks, Row

WINDOW_SECONDS = 5.0
JUMP_SECONDS = 3600.0
MAX_BACKWARDS = 50


class Timeline:
    """Sorter of rows. ``in_order`` yields each row with its seconds since the start, which never decrease."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._waiting: list[tuple[float, int, Row]] = []
        self._pending: list[Row] = []
        self._first_pending: dict[tuple[str, int | None], Row] = {}
        self._backwards = 0
        self._newest: float | None = None
        self._count = 0
        self._elapsed = 0.0
        self._step = 1.0
        self._offset: float | None = None

    def in_order(self, rows: Iterable[Row]) -> Iterator[tuple[float, Row]]:
        for row in rows:
            newest = self._newest
            if newest is None or newest - WINDOW_SECONDS <= row.at <= newest + JUMP_SECONDS:
                if self._pending:
                    self._remarks.strays += len(self._pending)
                    self._forget_pending()
                self._wait(row)
                yield from self._rows_until(max(row.at, newest or row.at) - WINDOW_SECONDS)
            else:
                yield from self._jump(row)
        yield from self._rows_until(float("inf"))
        if self._pending:
            self._check_direction(3)
            yield from self._restart(self._pending)

    def _wait(self, row: Row) -> None:
        self._count += 1
        self._newest = row.at if self._newest is None else max(self._newest, row.at)
        heapq.heappush(self._waiting, (row.at, self._count, row))

    def _rows_until(self, until: float) -> Iterator[tuple[float, Row]]:
        while self._waiting and self._waiting[0][0] <= until:
            at, _, row = heapq.heappop(self._waiting)
            if self._offset is None:
                self._offset = self._elapsed - at
            elapsed = at + self._offset
            if elapsed > self._elapsed:
                self._step, self._elapsed = elapsed - self._elapsed, elapsed
            yield self._elapsed, row

    def _jump(self, row: Row) -> Iterator[tuple[float, Row]]:
        """Continue from the time of the pending rows, once a series has continued there."""
        self._pending.append(row)
        first = self._first_pending.setdefault((row.device, row.pid), row)
        if first.at < row.at:
            yield from self._rows_until(float("inf"))
            yield from self._restart([r for r in self._pending if first.at - WINDOW_SECONDS <= r.at <= row.at])
        elif first.at > row.at:
            self._backwards += 1
            self._check_direction(MAX_BACKWARDS)

    def _check_direction(self, limit: int) -> None:
        if self._backwards > limit:
            raise ConfigError(
                f"{self._remarks.name}, line {self._pending[0].line}: time decreases from this line on;"
                " sort the log by time first"
            )

    def _forget_pending(self) -> None:
        self._pending, self._first_pending, self._backwards = [], {}, 0

    def _restart(self, rows: list[Row]) -> Iterator[tuple[float, Row]]:
        self._remarks.strays += len(self._pending) - len(rows)
        first = min(row.at for row in rows)
        if self._newest is not None and first < self._newest:
            self._remarks.note(
                "back", f"line {rows[0].line}: the log's clock was set back; time continues from the last reading"
            )
            self._elapsed, self._offset = self._elapsed + self._step, None
        self._forget_pending()
        self._newest = None
        for row in rows:
            self._wait(row)
        yield from self._rows_until((self._newest or 0.0) - WINDOW_SECONDS)
