"""What rules are about: the rows of a scope, their values and labels, and those that cannot be read now. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from gpumond.facts.process import ProcessKey
from gpumond.facts.rule import Labels
from gpumond.quantities.table import Unit

Texts = Mapping[str, str | Callable[[], str]]
"""Texts of placeholders. A text that takes time is a function, which is called if an annotation contains it."""
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects(Generic[Row]):
    """Rows of one scope, and functions for the values, labels and texts of a row.

    They are evaluated on demand: nearly every row of a tick needs one or two values only. A value is None if it is
    unknown now; ``texts`` fill annotations; ``programs`` are the names of the programs on the subject, which a
    match on ``workload`` uses where that is no label; ``process`` is the subject's process, if it has one.
    """

    rows: Sequence[Row]
    values: Mapping[str, Callable[[Row], float | None]]
    units: Mapping[str, Unit]
    labels: Callable[[Row], Labels]
    texts: Callable[[Row], Texts]
    programs: Callable[[Row], Sequence[str]] = lambda row: ()
    process: Callable[[Row], ProcessKey | None] = lambda row: None


class Hidden(NamedTuple):
    """Subjects that cannot be read now but have not ended: their alerts are unchanged.

    ``connected``: processes with a connected agent. They have not ended, even if the driver does not list them: an
    alert on one without a row resolves after ``keep_firing_for``.
    """

    devices: frozenset[str] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    workloads: frozenset[tuple[str, str]] = frozenset()
    """uid and name"""
    connected: Collection[ProcessKey] = frozenset()

    def covers(self, labels: Mapping[str, str], process: ProcessKey | None) -> bool:
        return (
            labels.get("uuid") in self.devices
            or process in self.processes
            or (labels.get("uid"), labels.get("workload")) in self.workloads
        )
