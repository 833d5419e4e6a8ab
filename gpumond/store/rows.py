"""Rows of the store: values as JSON, and rows decoded one by one, where a damaged row is skipped and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from gpumond.facts.alerts import Kind, Notice
from gpumond.facts.errors import ProtocolError
from gpumond.facts.frame import Alert
from gpumond.facts.snapshot import Fault
from gpumond.store.audit import canonical
from gpumond.tick.history import CoarseSeries

if TYPE_CHECKING:
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)
T = TypeVar("T")


class Rows:
    """Decoder that counts undecodable rows by table."""

    def __init__(self) -> None:
        self._left_out: dict[str, int] = {}

    def read(self, table: str, rows: Iterable[Any], decode: Callable[..., T]) -> list[T]:
        """Decode rows. ``decode`` takes a row's columns, and raises ValueError, TypeError or ProtocolError if
        they are damaged.
        """
        found: list[T] = []
        left_out = 0
        for row in rows:
            try:
                found.append(decode(*row))
            except (ValueError, TypeError, ProtocolError, RecursionError, OverflowError) as error:
                left_out += 1
                log.error("a row of the table %s cannot be read and is skipped: %.200s", table, _line(error))
        self.left_out(table, left_out)
        return found

    def left_out(self, table: str, rows: int) -> None:
        self._left_out[table] = rows

    def count(self, table: str) -> int:
        return self._left_out.get(table, 0)

    def faults(self) -> list[Fault]:
        return [
            Fault("store", "row_unreadable", None, f"{rows} of the table {table} cannot be read and are skipped")
            for table, rows in self._left_out.items()
            if rows
        ]


def text(value: object) -> str:
    """Return the text. Raises TypeError or ValueError for a value that is no text in UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    value.encode()
    return value


def notice(receiver: object, seq: object, kind: object, body: object) -> Notice:
    key = _adapter(tuple[str, int, Kind]).validate_python((receiver, seq, kind))
    return Notice(key[0], key[1], key[2], from_text(Alert, body))


def from_text(kind: type[T], body: object) -> T:
    """Decode JSON in UTF-8. Raises ValueError if it is not a value of this type; keys that this version does not know
    are left out, since a newer one may have written them.
    """
    value: T = _adapter(kind).validate_json(body)  # type: ignore[arg-type]  # it raises ValueError for other values
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the decoder of a type, made at the first use: most stores contain few kinds of rows at the start."""
    from pydantic import TypeAdapter  # a new store contains no rows at all

    return TypeAdapter(kind)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def to_text(value: Any) -> str:
    return canonical(asdict(value))


def coarse_text(series: CoarseSeries) -> str:
    """Encode like ``to_text``, without a copy of each number."""
    return canonical({field.name: getattr(series, field.name) for field in fields(series)})
