"""Metric family rendering in Prometheus text format or OpenMetrics.

A page for a thousand programs has 20,000 samples, and prometheus_client takes 8 us per sample. The families of a frame
are therefore rendered here; all others by the library. docs/decisions/008 has the figures, and the tests compare every
line with the library's.

Formats: prometheus.io/docs/instrumenting/exposition_formats, and OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import isfinite, isnan
from typing import Literal, NamedTuple

from gpumond.facts.frame import Frame

Row = tuple[tuple[str, ...], float | None]
"""Label values in the family's order, and the value. A row whose value is None is omitted."""


Kind = Literal["gauge", "counter"]


class Family(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Frame], Iterable[Row]]


LABEL_SETS = 16_384


TOTAL = "_total"


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
