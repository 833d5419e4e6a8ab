"""Verdicts on a device from the values of one tick. No I/O.

To add one, write a function and add it to ``DETECTORS``, with a `VerdictKind` in model/verdicts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpumond.diagnosis import messages
from gpumond.diagnosis.detectors import FULL, FULL_CLEAR
from gpumond.model.snapshot import DeviceReading
from gpumond.model.verdicts import VerdictName


class DeviceCase(NamedTuple):
    """A device whose ``used`` and ``size`` in bytes are known; ``active``: the verdict was active after the last tick.

    ``seconds_left``: the time until the device is full, if its recent peaks will fill it in ten minutes.
    """

    device: DeviceReading
    label: str
    used: int
    size: int
    seconds_left: float | None
    active: bool


class Found(NamedTuple):
    evidence: tuple[tuple[str, float], ...]
    summary: str
    seconds_left: float | None = None


def pressure(case: DeviceCase) -> Found | None:
    ratio, left = case.used / case.size, case.seconds_left
    if left is None and ratio <= (FULL_CLEAR if case.active else FULL):
        return None
    evidence = (("used_ratio", ratio), ("free_bytes", float(case.size - case.used)))
    return Found(evidence, messages.pressure(case.label, ratio, left), left)


DETECTORS: Mapping[VerdictName, Callable[[DeviceCase], Found | None]] = {"pressure": pressure}
