"""A family in Prometheus' text format or in OpenMetrics.

With a thousand programs a page has 20,000 samples, of which prometheus_client makes 8 us each: so the frame's families,
and they alone, are written here. docs/decisions/008 has the figures; the tests hold every line against the library.

Formats: prometheus.io/docs/instrumenting/exposition_formats, and OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import isfinite, isnan

from gpumond.metrics.family import Family, Row

LABEL_SETS = 16_384
TOTAL = "_total"


def write(family: Family, rows: Iterable[Row], openmetrics: bool) -> str:
    """Return the help and type, which are written without samples, too, and the samples."""
    return header(family, openmetrics) + samples(family, rows)


def header(family: Family, openmetrics: bool) -> str:
    name = family.name.removesuffix(TOTAL) if openmetrics else family.name
    text = _escaped(family.help) if openmetrics else _escaped(family.help, quotes=False)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def samples(family: Family, rows: Iterable[Row]) -> str:
    name, labels = family.name, family.labels
    return "".join(
        [f"{name}{_labels(labels, values)} {_number(value)}\n" for values, value in rows if value is not None]
    )


@lru_cache(LABEL_SETS)  # the same from frame to frame, and for all families of a pool
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    """Bytes as whole numbers, which lose nothing."""
    if isfinite(value):
        return str(+value)  # True is 1
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
