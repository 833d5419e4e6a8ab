"""Definition of a metric: name, help text, labels, and the function that derives its rows from a Frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from gpumond.model.frame import Frame

Row = tuple[tuple[str, ...], float | None]
"""Label values in the family's order, and the value. A row whose value is None is omitted."""

Kind = Literal["gauge", "counter"]


class Family(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Frame], Iterable[Row]]
