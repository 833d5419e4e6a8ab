"""Samples of an engine's metrics page. No I/O.

An engine's page has up to thousands of histogram buckets, of which a few gauges and counters are used: the names are
given, and other lines are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Metrics:
    """Samples of a page by name; those that are no finite number are absent."""

    def __init__(self, text: str) -> None:
        self._text = text

    def samples(self, name: str) -> Iterator[Sample]:
        for line in self._text.splitlines():
            if line.startswith(name) and (match := _LINE.match(line)) and match[1] == name:
                try:
                    value = float(match[3])
                except ValueError:
                    continue
                if isfinite(value):
                    yield Sample(dict(_LABEL.findall(match[2] or "")), value)

    def total(self, *names: str) -> float | None:
        """Return the sum of the samples of the first name that the page has; None if it has none."""
        return next((sum(values) for values in self._values(names)), None)

    def mean(self, *names: str) -> float | None:
        return next((sum(values) / len(values) for values in self._values(names)), None)

    def count(self, *names: str) -> int | None:
        total = self.total(*names)
        return None if total is None else int(total)

    def _values(self, names: tuple[str, ...]) -> Iterator[list[float]]:
        for name in names:
            if values := [sample.value for sample in self.samples(name)]:
                yield values
