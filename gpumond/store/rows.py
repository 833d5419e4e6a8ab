"""Rows of the store, read one by one: a damaged row is left out and counted, and the others are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gpumond.errors import ProtocolError
from gpumond.model import Fault

log = logging.getLogger(__name__)
T = TypeVar("T")


class Rows:
    """Reads rows and counts those that it could not read, by table."""

    def __init__(self) -> None:
        self._left_out: dict[str, int] = {}

    def read(self, table: str, rows: Iterable[Any], decode: Callable[..., T]) -> list[T]:
        """``decode`` takes a row's columns, and raises ValueError, TypeError or ProtocolError if they are damaged."""
        found: list[T] = []
        left_out = 0
        for row in rows:
            try:
                found.append(decode(*row))
            except (ValueError, TypeError, ProtocolError, RecursionError, OverflowError) as error:
                left_out += 1
                log.error("a row of the table %s cannot be read and is left out: %.200s", table, _line(error))
        self.left_out(table, left_out)
        return found

    def left_out(self, table: str, rows: int) -> None:
        self._left_out[table] = rows

    def count(self, table: str) -> int:
        return self._left_out.get(table, 0)

    def faults(self) -> list[Fault]:
        return [
            Fault("store", "row_unreadable", None, f"{rows} of the table {table} cannot be read and are left out")
            for table, rows in self._left_out.items()
            if rows
        ]


def text(value: object) -> str:
    """Raises TypeError or ValueError for what is no text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    value.encode()
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
