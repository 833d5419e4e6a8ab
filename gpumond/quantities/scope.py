"""Scopes of rules: their rows, values, labels and placeholders, and the subjects that cannot be read now. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpumond.facts.alerts import Labels
from gpumond.facts.frame import Ledger, Verdict
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import MAX_MISSED_READINGS, DeviceReading, Snapshot, owner_of
from gpumond.facts.units import duration_text, size_text
from gpumond.facts.verdicts import PROBLEM_KINDS, VERDICT_REMEDIES
from gpumond.quantities.quantity import Quantity, Unit
from gpumond.quantities.window import WINDOW_SECONDS, CounterHistory, RuleWindow

ProblemVerdicts = Mapping[tuple[str, ProcessKey | None], Sequence[Verdict]]
"""Active verdicts that indicate a problem, by device and process; None is the device as a whole"""

VALUES_WITHOUT_VERDICT: Mapping[str, float | None] = {
    **{kind.rule_value: 0.0 for kind in PROBLEM_KINDS},
    "leak_bytes_per_second": 0.0,
    "time_to_full_seconds": inf,
}
UNKNOWN_VERDICT_VALUES: Mapping[str, float | None] = dict.fromkeys(VALUES_WITHOUT_VERDICT)


def problem_verdicts(verdicts: Iterable[Verdict]) -> ProblemVerdicts:
    by_subject: defaultdict[tuple[str, ProcessKey | None], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.kind in VERDICT_REMEDIES:
            by_subject[verdict.device_uuid, verdict.process].append(verdict)
    return dict(by_subject)


def verdict_values(verdicts: Sequence[Verdict], defaults: Mapping[str, float | None]) -> Mapping[str, float | None]:
    """Return the values of rules; ``defaults`` has those without an active verdict."""
    if not verdicts:
        return defaults
    values = dict(defaults)
    slopes = [slope_bytes_per_second(verdict) for verdict in verdicts if verdict.kind == "leak"]
    if slopes:
        values["leak_bytes_per_second"] = sum(slopes)
    times = [verdict.time_to_full_seconds for verdict in verdicts if verdict.time_to_full_seconds is not None]
    if times:
        values["time_to_full_seconds"] = min(times)
    values.update((verdict.kind.replace("-", "_"), 1.0) for verdict in verdicts)
    return values


def slope_bytes_per_second(verdict: Verdict) -> float:
    return dict(verdict.evidence).get("slope_bytes_per_second", 0.0)


def values_without_verdict(device: DeviceReading) -> Mapping[str, float | None]:
    return UNKNOWN_VERDICT_VALUES if device.missed_readings >= MAX_MISSED_READINGS else VALUES_WITHOUT_VERDICT


class RuleRow(Protocol):
    """A row with the verdicts on it, and their values."""

    @property
    def verdicts(self) -> Sequence[Verdict]: ...

    @property
    def verdict_values(self) -> Mapping[str, float | None]: ...


def _verdict_value(name: str, meaning: str, is_boolean: bool = False) -> Quantity[RuleRow]:
    return Quantity(name, meaning, lambda row: row.verdict_values[name], is_boolean=is_boolean)


VERDICT_QUANTITIES = (
    *(
        _verdict_value(kind.rule_value, f"1 while the `{kind.name}` [verdict](verdicts.md) is active", is_boolean=True)
        for kind in PROBLEM_KINDS
    ),
    _verdict_value("leak_bytes_per_second", "growth rate of all leaks; 0 without a leak"),
    _verdict_value(
        "time_to_full_seconds",
        "time until the memory is full, as a `leak` or `pressure` verdict predicts; infinite without such a verdict",
    ),
)


def _summaries(row: RuleRow) -> str:
    return "; ".join(dict.fromkeys(verdict.summary.rstrip(".") for verdict in row.verdicts)) or "nothing"


def _time_to_full(row: RuleRow) -> str:
    seconds = row.verdict_values["time_to_full_seconds"]
    return "never" if seconds is None or seconds == inf else duration_text(seconds)


Row = TypeVar("Row")
Placeholders = Mapping[str, tuple[str, Callable[[Row], str]]]
"""What each placeholder of an annotation means, and its text for a row."""

VERDICT_PLACEHOLDERS: Placeholders[RuleRow] = {
    "verdicts": ("summaries of the active verdicts", _summaries),
    "slope": (
        "growth of the leak per minute",
        lambda row: f"{size_text(60 * (row.verdict_values['leak_bytes_per_second'] or 0.0))}/min",
    ),
    "time_to_full": ("time until the memory is full", _time_to_full),
}


class RuleContext(NamedTuple):
    """Facts from which the values of rules are computed."""

    snapshot: Snapshot
    ledger: Ledger
    window: RuleWindow
    problem_verdicts: ProblemVerdicts = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects(Generic[Row]):
    """Rows of one scope, and functions for the values, labels and texts of a row.

    They are evaluated on demand: nearly every row of a tick needs one or two values only. A value is None if it is
    unknown now; ``texts`` fill placeholders; ``programs`` are the names of the programs on the subject, which a
    match on ``workload`` uses where that isn't a label; ``process`` is the subject's process, if it has one;
    ``owner`` are the labels of its owner.
    """

    rows: Sequence[Row]
    values: Mapping[str, Callable[[Row], float | None]]
    units: Mapping[str, Unit]
    labels: Callable[[Row], Labels]
    texts: Mapping[str, Callable[[Row], str]]
    programs: Callable[[Row], Sequence[str]] = lambda row: ()
    process: Callable[[Row], ProcessKey | None] = lambda row: None
    owner: Callable[[ProcessKey], Labels] = lambda process: ()


class UnreadableSubjects(NamedTuple):
    """Subjects that cannot be read now but have not ended: their alerts are unchanged.

    ``connected``: processes with a connected agent. They have not ended, even if the driver does not list them: an
    alert on one without a row resolves after ``keep_firing_for``. ``suspended``: processes that are known to be
    suspended. They aren't subjects, and their alerts resolve immediately.
    """

    devices: frozenset[str] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    workloads: frozenset[tuple[str, str]] = frozenset()
    """uid and name"""
    connected: Collection[ProcessKey] = frozenset()
    suspended: Collection[ProcessKey] = frozenset()

    def covers(self, labels: Mapping[str, str], process: ProcessKey | None) -> bool:
        return (
            labels.get("uuid") in self.devices
            or process in self.processes
            or (labels.get("uid"), labels.get("workload")) in self.workloads
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeSpec(Generic[Row]):
    """One scope: its rows, and the quantities and words of rules on them. ``label_meanings``: those in ``match``."""

    rows: Callable[[RuleContext], Sequence[Row]]
    quantities: tuple[Quantity[Row], ...]
    label_meanings: Mapping[str, str]
    labels_of: Callable[[Row], Labels]
    placeholders: Placeholders[Row]
    programs: Callable[[Row], Sequence[str]] = lambda row: ()
    process: Callable[[Row], ProcessKey | None] = lambda row: None

    def subjects(self, context: RuleContext) -> Subjects[Row]:
        return Subjects(
            rows=self.rows(context),
            values={quantity.name: quantity.read for quantity in self.quantities},
            units={quantity.name: quantity.unit for quantity in self.quantities},
            labels=self.labels_of,
            texts={name: text for name, (_, text) in self.placeholders.items()},
            programs=self.programs,
            process=self.process,
            owner=partial(owner_labels, context.snapshot),
        )


def owner_labels(snapshot: Snapshot, key: ProcessKey) -> Labels:
    """Return the labels of a process's owner, as in `gpumond_process_info`; an unknown part is absent."""
    listed = (device.processes_by_key[key] for device in snapshot.devices if key in device.processes_by_key)
    process = next(listed, None)
    owner = owner_of(process, snapshot.reports_by_process.get(key))
    pod, job = (process.pod_name, process.slurm_job) if process else (None, None)
    texts = (owner.user, owner.pod_namespace, pod, job)
    return tuple((name, text) for name, text in zip(OWNER_LABELS, texts, strict=True) if text)


OWNER_LABELS = ("user", "pod_namespace", "pod_name", "slurm_job")


DEVICE_LABELS = {"gpu": "index of the device", "uuid": "UUID of the device"}

IN_WINDOW = f"in the last {WINDOW_SECONDS / 60:.0f} minutes"
FULL_WINDOW_NOTE = "zero is unknown until a full window has been observed"


def device_placeholders(device: Callable[[Row], DeviceReading]) -> Placeholders[Row]:
    return {
        "gpu": (DEVICE_LABELS["gpu"], lambda row: str(device(row).index)),
        "uuid": (DEVICE_LABELS["uuid"], lambda row: device(row).uuid),
        "name": ("model of the device", lambda row: device(row).name),
        "size": ("memory of the device", lambda row: size_text_or_unknown(device(row).size_bytes)),
    }


class WindowRow(Protocol):
    """A row of a subject whose counters are observed."""

    @property
    def window(self) -> RuleWindow: ...


RowWithWindow = TypeVar("RowWithWindow", bound=WindowRow)


def increase_quantity(
    quantity: Quantity[RowWithWindow], position: int, history: Callable[[RowWithWindow], CounterHistory | None]
) -> Quantity[RowWithWindow]:
    """Return the increase of a counter. ``position``: where the counts of ``history`` have it."""
    count = quantity.read
    name = "energy_increase_joules" if quantity.name == "energy_joules" else f"{quantity.name}_increase"

    def read(row: RowWithWindow) -> float | None:
        counter_history = history(row)
        return (
            None
            if counter_history is None
            else counter_history.increase(position, count(row), row.window.elapsed_seconds)
        )

    return Quantity(name, f"increase of `{quantity.name}` {IN_WINDOW}; {FULL_WINDOW_NOTE}", read)


def size_text_or_unknown(value: float | None) -> str:
    return "an unknown amount" if value is None else size_text(value)


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
