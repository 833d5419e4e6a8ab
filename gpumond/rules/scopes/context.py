"""Facts that all scopes use for the values of rules. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpumond.model.frame import Ledger
from gpumond.model.snapshot import MISSED_LIMIT, DeviceReading, Snapshot
from gpumond.model.units import human
from gpumond.rules.verdicts import NOTHING, UNKNOWN, ActiveVerdicts
from gpumond.rules.window import RuleWindow


class RuleContext(NamedTuple):
    """Facts from which the values of rules are computed."""

    snapshot: Snapshot
    ledger: Ledger
    recent: RuleWindow
    active_verdicts: ActiveVerdicts = MappingProxyType({})


def unjudged(device: DeviceReading) -> Mapping[str, float | None]:
    return UNKNOWN if device.missed >= MISSED_LIMIT else NOTHING


class RuleRow(Protocol):
    """A row with the values of the verdicts on it."""

    @property
    def verdict_values(self) -> Mapping[str, float | None]: ...


def _verdict_value(name: str, row: RuleRow) -> float | None:
    return row.verdict_values[name]


VERDICTS: Mapping[str, Callable[[RuleRow], float | None]] = {name: partial(_verdict_value, name) for name in NOTHING}


def named(device: DeviceReading) -> dict[str, str]:
    return {
        "gpu": str(device.index),
        "uuid": device.uuid,
        "name": device.name,
        "size": size(device.size_bytes),
    }


def size(value: float | None) -> str:
    return "an unknown amount" if value is None else human(value)


def ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
