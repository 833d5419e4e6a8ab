"""What a metric is: a name, a help text, labels, and how its rows follow from a Frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from gpumond.model.frame import Frame

Row = tuple[tuple[str, ...], float | None]
"""Label values in the family's order, and the value; a row with None is left out."""

Kind = Literal["gauge", "counter"]


class Family(NamedTuple):
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Frame], Iterable[Row]]
