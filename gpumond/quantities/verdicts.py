"""Verdicts as the values of rules. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Protocol

from gpumond.facts.frame import Verdict
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import MISSED_LIMIT, DeviceReading
from gpumond.facts.units import duration, human
from gpumond.facts.verdicts import PROBLEMS, REMEDIES
from gpumond.quantities.table import Quantity, Unit

ActiveVerdicts = Mapping[tuple[str, ProcessKey | None], Sequence[Verdict]]
"""Active verdicts that indicate a problem, by device and process; None is the device as a whole"""

NOTHING: Mapping[str, float | None] = {
    **{kind.rule_value: 0.0 for kind in PROBLEMS},
    "leak_bytes_per_second": 0.0,
    "time_to_oom_seconds": inf,
}
UNKNOWN: Mapping[str, float | None] = dict.fromkeys(NOTHING)


def active_verdicts(verdicts: Iterable[Verdict]) -> ActiveVerdicts:
    found: defaultdict[tuple[str, ProcessKey | None], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.kind in REMEDIES:
            found[verdict.device_uuid, verdict.process].append(verdict)
    return dict(found)


def values(verdicts: Sequence[Verdict], otherwise: Mapping[str, float | None]) -> Mapping[str, float | None]:
    """Return the values of rules; ``otherwise`` has those without an active verdict."""
    if not verdicts:
        return otherwise
    own = dict(otherwise)
    slopes = [slope(verdict) for verdict in verdicts if verdict.kind == "leak"]
    if slopes:
        own["leak_bytes_per_second"] = sum(slopes)
    times = [verdict.time_to_oom_seconds for verdict in verdicts if verdict.time_to_oom_seconds is not None]
    if times:
        own["time_to_oom_seconds"] = min(times)
    own.update((verdict.kind.replace("-", "_"), 1.0) for verdict in verdicts)
    return own


def texts(verdicts: Sequence[Verdict]) -> dict[str, str]:
    found = values(verdicts, NOTHING)
    time_to_oom = found["time_to_oom_seconds"]
    return {
        "verdicts": "; ".join(dict.fromkeys(verdict.summary.rstrip(".") for verdict in verdicts)) or "nothing",
        "slope": f"{human(60 * (found['leak_bytes_per_second'] or 0.0))}/min",
        "time_to_oom": "never" if time_to_oom is None or time_to_oom == inf else duration(time_to_oom),
    }


def slope(verdict: Verdict) -> float:
    return dict(verdict.evidence).get("slope_bytes_per_second", 0.0)


def values_without_verdict(device: DeviceReading) -> Mapping[str, float | None]:
    return UNKNOWN if device.missed >= MISSED_LIMIT else NOTHING


class RuleRow(Protocol):
    """A row with the values of the verdicts on it."""

    @property
    def verdict_values(self) -> Mapping[str, float | None]: ...


def _verdict_value(name: str, unit: Unit, meaning: str) -> Quantity[RuleRow]:
    return Quantity(name, unit, meaning, lambda row: row.verdict_values[name])


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
