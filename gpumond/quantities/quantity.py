"""What gpumond measures: a number with its name, unit and meaning. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

from gpumond.facts.units import duration_text, size_text

Unit = Literal["bytes", "bytes/s", "seconds", "ratio", "count", "boolean", "celsius", "hertz", "watts", "joules"]
"""Unit of a value; a boolean is 0 or 1."""
UNITS_BY_SUFFIX: Mapping[str, Unit] = {
    "_bytes_per_second": "bytes/s",
    **{f"_{unit}": unit for unit in ("bytes", "seconds", "ratio", "celsius", "hertz", "watts", "joules")},
}
"""Ends of names, and the unit that they state; other values are counts, or booleans."""

Row_contra = TypeVar("Row_contra", contravariant=True)
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Quantity(Generic[Row_contra]):
    """A number that `/metrics` exports, that rules compare, or both. ``read`` returns None while it is unknown.

    ``name`` is the name of the rule value. ``family`` is the metric family without the prefix of its subject: a counter
    if it ends in ``_total``, the name if it is None, and empty if the quantity isn't a metric. ``labels`` distinguish
    the quantities of one family. ``note`` continues ``text`` in the family's HELP and ``rule_note`` in the reference of
    rules; ``export`` replaces ``read`` in the family.
    ``is_counter``: it counts events, and its increase within the window of rules is another rule value. ``is_boolean``:
    it is 0 or 1; the end of its name states the unit of any other. ``may_exceed_one``: it's a ratio that can exceed 1.
    """

    name: str
    text: str
    read: Callable[[Row_contra], float | None]
    family: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    note: str = field(default="", kw_only=True)
    rule_note: str = field(default="", kw_only=True)
    export: Callable[[Row_contra], float | None] | None = field(default=None, kw_only=True)
    is_counter: bool = field(default=False, kw_only=True)
    is_boolean: bool = field(default=False, kw_only=True)
    may_exceed_one: bool = field(default=False, kw_only=True)

    @property
    def unit(self) -> Unit:
        units = (unit for suffix, unit in UNITS_BY_SUFFIX.items() if self.name.endswith(suffix))
        return "boolean" if self.is_boolean else next(units, "count")

    @property
    def range_text(self) -> str:
        """Return the range of the values as text; empty if it isn't from 0 to 1."""
        if self.unit == "boolean":
            return "0 or 1"
        return "from 0 to 1 (100%)" if self.unit == "ratio" and not self.may_exceed_one else ""

    @property
    def family_name(self) -> str:
        return self.name if self.family is None else self.family

    @property
    def help(self) -> str:
        return self.text + self.note

    @property
    def meaning(self) -> str:
        return self.text + self.rule_note

    def of_part(self, part_of: Callable[[Whole], Row_contra | None]) -> Quantity[Whole]:
        """Return this quantity of a part of a row; it is unknown while the row has no such part."""
        read_quantity = self.read

        def read(row: Whole) -> float | None:
            part = part_of(row)
            return None if part is None else float_or_none(read_quantity(part))

        return Quantity(self.name, self.meaning, read, is_boolean=self.is_boolean, may_exceed_one=self.may_exceed_one)


def attribute_quantity(
    name: str, text: str, family: str | None = None, *, field: str = "", **options: Any
) -> Quantity[Any]:
    """Return the quantity that a fact has as an attribute: ``field``, or that of its name."""
    return Quantity(name, text, attrgetter(field or name), family, **options)


def float_or_none(value: float | None) -> float | None:
    return None if value is None else float(value)


def value_text(unit: Unit, value: float) -> str:
    """Format a value with its unit."""
    if unit == "bytes":
        return size_text(value)
    if unit == "bytes/s":
        return f"{size_text(60 * value)}/min"
    if unit == "seconds":
        return duration_text(value)
    if unit == "ratio":
        return f"{round(100 * value, 1):g}%"
    if unit == "hertz":
        return f"{value / 1e6:.0f} MHz"
    return f"{value:g}{UNIT_SYMBOLS.get(unit, '')}"


UNIT_SYMBOLS: Mapping[Unit, str] = {"celsius": " °C", "watts": " W", "joules": " J"}
