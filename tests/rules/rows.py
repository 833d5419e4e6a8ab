"""Subjects without a particular scope: labels, one value, texts, programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gpumond.facts.alerts import Labels
from gpumond.facts.program import ProcessKey
from gpumond.quantities.quantity import Unit
from gpumond.quantities.scope import Subjects


class Row(NamedTuple):
    labels: Labels
    value: float | None
    texts: Mapping[str, str] = {}
    programs: Sequence[str] = ()
    process: ProcessKey | None = None


def of(name: str, *rows: Row, unit: Unit = "count") -> Subjects[Row]:
    return Subjects(
        rows=rows,
        values={name: lambda row: row.value},
        units={name: unit},
        labels=lambda row: row.labels,
        texts={name: partial(_text, name) for row in rows for name in row.texts},
        programs=lambda row: row.programs,
        process=lambda row: row.process,
    )


def _text(name: str, row: Row) -> str:
    return row.texts[name]
