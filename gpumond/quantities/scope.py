"""Scopes of rules: their rows, values, labels and placeholders, and the subjects that cannot be read now. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpumond.facts.frame import Ledger
from gpumond.facts.process import ProcessKey
from gpumond.facts.rule import Labels
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.facts.units import human
from gpumond.quantities.table import Quantity, Unit
from gpumond.quantities.verdicts import ActiveVerdicts
from gpumond.quantities.window import WINDOW_SECONDS, CounterHistory, RuleWindow

Texts = Mapping[str, str | Callable[[], str]]
"""Texts of placeholders. A text that takes time is a function, which is called if an annotation contains it."""
Row = TypeVar("Row")


class RuleContext(NamedTuple):
    """Facts from which the values of rules are computed."""

    snapshot: Snapshot
    ledger: Ledger
    recent: RuleWindow
    active_verdicts: ActiveVerdicts = MappingProxyType({})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeSpec(Generic[Row]):
    """One scope: its rows, and the words of rules on them.

    ``labels`` and ``placeholders`` describe the labels that ``match`` can use and the results of ``texts``.
    """

    rows: Callable[[RuleContext], Sequence[Row]]
    values: tuple[Quantity[Row], ...]
    labels: Mapping[str, str]
    labels_of: Callable[[Row], Labels]
    placeholders: Mapping[str, str]
    texts: Callable[[Row], Texts]
    programs: Callable[[Row], Sequence[str]] = lambda row: ()
    process: Callable[[Row], ProcessKey | None] = lambda row: None

    def subjects(self, context: RuleContext) -> Subjects[Row]:
        return Subjects(
            rows=self.rows(context),
            values={value.name: value.read for value in self.values},
            units={value.name: value.unit for value in self.values},
            labels=self.labels_of,
            texts=self.texts,
            programs=self.programs,
            process=self.process,
        )


DEVICE_LABELS = {"gpu": "index of the device", "uuid": "UUID of the device"}
NAMED = {**DEVICE_LABELS, "name": "model of the device", "size": "memory of the device"}

IN_WINDOW = f"in the last {WINDOW_SECONDS / 60:.0f} minutes"
FROM_A_FULL_WINDOW = "zero is unknown until a full window has been observed"


def named(device: DeviceReading) -> dict[str, str]:
    return {
        "gpu": str(device.index),
        "uuid": device.uuid,
        "name": device.name,
        "size": size(device.size_bytes),
    }


class WindowRow(Protocol):
    """A row of a subject whose counters are observed."""

    @property
    def recent(self) -> RuleWindow: ...


Counted = TypeVar("Counted", bound=WindowRow)


def increase(
    quantity: Quantity[Counted], position: int, history: Callable[[Counted], CounterHistory | None]
) -> Quantity[Counted]:
    """Return the increase of a counter, which is at this position in the counts of ``history``."""
    count = quantity.read
    name = "energy_increase_joules" if quantity.name == "energy_joules" else f"{quantity.name}_increase"

    def read(row: Counted) -> float | None:
        observed = history(row)
        return None if observed is None else observed.increase(position, count(row), row.recent.elapsed)

    return Quantity(name, quantity.unit, f"Increase of `{quantity.name}` {IN_WINDOW}; {FROM_A_FULL_WINDOW}", read)


def size(value: float | None) -> str:
    return "an unknown amount" if value is None else human(value)


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
