"""Metric family rendering in Prometheus text format or OpenMetrics.

A page for a thousand programs has 20,000 samples, and prometheus_client takes 8 us per sample. The families of a frame
are therefore rendered here; all others by the library. Decision 008 in
docs/contributing has the figures, and the tests compare every line with the library's.

Formats: prometheus.io/docs/instrumenting/exposition_formats, and OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from itertools import groupby
from math import isfinite, isnan
from typing import Any, Literal, NamedTuple, TypeVar

from gpumond.facts.frame import Frame
from gpumond.quantities.table import SHARED_FAMILIES, Quantity

Row = tuple[tuple[str, ...], float | None]
"""Label values in the family's order, and the value. A row whose value is None is omitted."""


Kind = Literal["gauge", "counter"]


Rows = Callable[[Frame], Iterable[Row]]


class Family(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    rows: Rows


LABEL_SETS = 16_384
TOTAL = "_total"

Fact = TypeVar("Fact")
Facts = Callable[[Frame], Iterable[tuple[tuple[str, ...], Fact]]]
"""The facts of one kind in a frame, each with its label values."""


def families(
    prefix: str, labels: tuple[str, ...], facts: Facts[Fact], quantities: Iterable[Quantity[Fact]]
) -> Iterator[Family]:
    """Yield the families of quantities in their order; consecutive ones of one name share a family."""
    facts = _read_once(facts)
    for name, group in groupby(quantities, lambda quantity: quantity.metric):
        members = tuple(group)
        if name and members[0].labels:
            names = (*labels, *members[0].labels)
            yield Family(
                f"{prefix}{name}", kind_of(name), SHARED_FAMILIES[name], names, partial(_shared, facts, members)
            )
        elif name:
            (quantity,) = members
            yield family(prefix, labels, quantity, partial(_rows, facts, quantity.export or quantity.read))


def family(prefix: str, labels: tuple[str, ...], quantity: Quantity[Any], rows: Rows, note: str = "") -> Family:
    """Return the family of a quantity whose rows are not one for each fact."""
    name = quantity.metric
    return Family(f"{prefix}{name}", kind_of(name), quantity.help + note, labels, rows)


def kind_of(name: str) -> Kind:
    return "counter" if name.endswith(TOTAL) else "gauge"


def _read_once(facts: Facts[Fact]) -> Facts[Fact]:
    """Return a function that keeps the facts of the last frame, which all families of these facts read."""
    kept: tuple[Frame | None, Collection[tuple[tuple[str, ...], Fact]]] = None, ()

    def read(frame: Frame) -> Collection[tuple[tuple[str, ...], Fact]]:
        nonlocal kept
        last, read_facts = kept
        if frame is not last:
            read_facts = tuple(facts(frame))
            kept = frame, read_facts
        return read_facts

    return read


def _rows(facts: Facts[Fact], read: Callable[[Fact], float | None], frame: Frame) -> Iterable[Row]:
    return [(labels, read(fact)) for labels, fact in facts(frame)]


def _shared(facts: Facts[Fact], quantities: Iterable[Quantity[Fact]], frame: Frame) -> Iterator[Row]:
    for labels, fact in facts(frame):
        for quantity in quantities:
            yield (*labels, *quantity.labels.values()), quantity.read(fact)


def write(family: Family, rows: Iterable[Row], openmetrics: bool) -> str:
    """Return the family's HELP and TYPE lines, followed by its samples, if any."""
    return _header(family, openmetrics) + _samples(family, rows)


@lru_cache(1_024)
def _header(family: Family, openmetrics: bool) -> str:
    name = family.name.removesuffix(TOTAL) if openmetrics else family.name
    text = _escaped(family.help) if openmetrics else _escaped(family.help, quotes=False)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def _samples(family: Family, rows: Iterable[Row]) -> str:
    name, labels = family.name, family.labels
    return "".join(
        [f"{name}{_labels(labels, values)} {_number(value)}\n" for values, value in rows if value is not None]
    )


@lru_cache(LABEL_SETS)  # unchanged from frame to frame, and shared by all families of a pool
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    """Format a value; integers stay integers, so that bytes are exact."""
    if isfinite(value):
        return str(+value)  # True is 1
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
