"""Facts that all scopes use for the values of rules. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpumond.facts.frame import Ledger
from gpumond.facts.process import ProcessKey
from gpumond.facts.rule import Labels
from gpumond.facts.snapshot import MISSED_LIMIT, DeviceReading, Snapshot
from gpumond.facts.units import human
from gpumond.facts.verdicts import PROBLEMS
from gpumond.quantities.subjects import Subjects, Texts
from gpumond.quantities.table import Unit
from gpumond.quantities.verdicts import NOTHING, UNKNOWN, ActiveVerdicts
from gpumond.quantities.window import WINDOW_SECONDS, RuleWindow


class RuleContext(NamedTuple):
    """Facts from which the values of rules are computed."""

    snapshot: Snapshot
    ledger: Ledger
    recent: RuleWindow
    active_verdicts: ActiveVerdicts = MappingProxyType({})


def values_without_verdict(device: DeviceReading) -> Mapping[str, float | None]:
    return UNKNOWN if device.missed >= MISSED_LIMIT else NOTHING


Row = TypeVar("Row")
Row_contra = TypeVar("Row_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class RuleAttribute(Generic[Row_contra]):
    """One value that rules can compare. ``read`` returns None while it is unknown."""

    name: str
    unit: Unit
    meaning: str
    read: Callable[[Row_contra], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeSpec(Generic[Row]):
    """One scope: its rows, and the words of rules on them.

    ``labels`` and ``placeholders`` describe the labels that ``match`` can use and the results of ``texts``.
    """

    rows: Callable[[RuleContext], Sequence[Row]]
    values: tuple[RuleAttribute[Row], ...]
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


class RuleRow(Protocol):
    """A row with the values of the verdicts on it."""

    @property
    def verdict_values(self) -> Mapping[str, float | None]: ...


def _verdict_value(name: str, unit: Unit, meaning: str) -> RuleAttribute[RuleRow]:
    return RuleAttribute(name, unit, meaning, lambda row: row.verdict_values[name])


VERDICTS = (
    *(
        _verdict_value(kind.rule_value, "boolean", f"1 while the [verdict](verdicts.md) {kind.name} is active")
        for kind in PROBLEMS
    ),
    _verdict_value("leak_bytes_per_second", "bytes/s", "growth rate of a leak; 0 without a leak"),
    _verdict_value(
        "time_to_oom_seconds",
        "seconds",
        "time until the memory is full at the present growth rate; infinite without growth",
    ),
)
VERDICT_TEXTS = {
    "verdicts": "summaries of the active verdicts",
    "slope": "growth of its leak per minute",
    "time_to_oom": "time until the memory is full",
}
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


def number(value: float | None) -> float | None:
    return None if value is None else float(value)


def size(value: float | None) -> str:
    return "an unknown amount" if value is None else human(value)


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
