"""Subjects without a particular scope: labels, one value, texts, programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.model.process import ProcessKey
from gpumond.rules import Labels, Subjects


class Row(NamedTuple):
    labels: Labels
    value: float | None
    texts: Mapping[str, str] = {}
    programs: Sequence[str] = ()
    process: ProcessKey | None = None


def of(name: str, *rows: Row) -> Subjects[Row]:
    return Subjects(
        rows,
        {name: lambda row: row.value},
        lambda row: row.labels,
        lambda row: row.texts,
        lambda row: row.programs,
        lambda row: row.process,
    )
