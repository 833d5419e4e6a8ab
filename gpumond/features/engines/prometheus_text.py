"""Samples of an engine's metrics page, which is bounded and read in one pass. No I/O.

An engine's page has up to thousands of histogram buckets, of which a few gauges and counters are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumond.facts.errors import EngineError

MAX_LINES = 20_000
MAX_LINE_BYTES = 1024
"""Longer lines are skipped: labels of the samples that are used are names of models and ranks."""
MAX_VALUE = float(1 << 63)

_LINE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+([0-9eE+.-]+)")
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Metrics:
    """Samples of a page by name. Those that are not finite, or larger than 2^63, are absent.

    Raises EngineError for a page of too many lines.
    """

    def __init__(self, page: bytes) -> None:
        if page.count(b"\n") > MAX_LINES:
            raise EngineError(f"its metrics have more than {MAX_LINES:,} lines: is the kind of the engine correct?")
        self._values: dict[str, list[tuple[bytes, float]]] = {}
        for line in page.split(b"\n"):
            if line.startswith(b"#") or len(line) > MAX_LINE_BYTES or not (match := _LINE.match(line)):
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if abs(value) < MAX_VALUE:
                self._values.setdefault(match[1].decode(), []).append((match[2] or b"", value))

    def samples(self, name: str) -> list[Sample]:
        parsed = ((dict(_LABEL.findall(text.decode("utf-8", "replace"))), value) for text, value in self._of(name))
        return [Sample(labels, value) for labels, value in parsed]

    def total(self, *names: str) -> float | None:
        """Return the sum of the samples of the first name that the page has; None if it has none."""
        return next((sum(values) for values in self._known(names)), None)

    def mean(self, *names: str) -> float | None:
        return next((sum(values) / len(values) for values in self._known(names)), None)

    def count(self, *names: str) -> int | None:
        total = self.total(*names)
        return None if total is None else int(total)

    def sum_of(self, *names: str) -> int | None:
        """Return the sum over all these names; None if the page has none of them."""
        counts = [count for name in names if (count := self.count(name)) is not None]
        return sum(counts) if counts else None

    def counters(self, *names: str) -> tuple[float, ...] | None:
        """Return the total of each of these names, 0 for one that the page lacks; None if it has none of them."""
        totals = [self.total(name) for name in names]
        return None if all(total is None for total in totals) else tuple(total or 0.0 for total in totals)

    def _known(self, names: Iterable[str]) -> Iterator[list[float]]:
        return ([value for _, value in self._of(name)] for name in names if self._of(name))

    def _of(self, name: str) -> list[tuple[bytes, float]]:
        return self._values.get(name, [])
