"""Peaks of earlier runs of a workload, and the size that the next run needs. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

LEAST_RUNS = 3
KEPT_RUNS = 20
"""Runs of one workload on one kind of device that are kept, the newest."""
QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantiles of Student's t distribution for 1 to 10 degrees of freedom."""
NORMAL_QUANTILE = 1.76
"""Upper bound of the quantiles beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeak:
    """The most memory that one run held on one device: the driver's count, which includes the overhead.

    ``device_name`` is the kind of the device, ``world_size`` the number of ranks, 1 for a program of one.
    """

    id: str
    uid: int
    workload: str
    device_name: str
    world_size: int
    peak_bytes: int
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoNeed:
    """The size for the next run: 95 % of runs need at most ``need_bytes``. None with fewer than three runs.

    ``runs`` is the number of earlier runs from which it was derived, ``largest_bytes`` their highest peak.
    """

    workload: str
    device_name: str
    world_size: int
    runs: int
    need_bytes: int | None
    largest_bytes: int | None


def upper_bound(peaks: Sequence[int]) -> int | None:
    """Return the bytes that the next run exceeds with 5 % probability; None with fewer than three peaks.

    It is the prediction bound of a normal distribution, and at least the highest peak.
    """
    count = len(peaks)
    if count < LEAST_RUNS:
        return None
    mean = sum(peaks) / count
    deviation = sqrt(sum((peak - mean) ** 2 for peak in peaks) / (count - 1))
    quantile = QUANTILES[count - 2] if count - 2 < len(QUANTILES) else NORMAL_QUANTILE
    return max(*peaks, int(mean + quantile * deviation * sqrt(1 + 1 / count)))
