"""Peaks of runs: followed while a program runs, stored when it has ended; and the size that the next run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from gpumond.core import Core, Part, Tick
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, Snapshot
from gpumond.host.tasks import Tasks
from gpumond.store.table import Table

MAX_IN_PROGRESS, MAX_STORED_RUNS = 4096, 2000


class RunInProgress(NamedTuple):
    """A run that is followed, with its highest use so far."""

    uid: int
    workload: str
    device_name: str
    world_size: int
    peak_bytes: int


class RunPeaks:
    """The peaks of earlier runs, oldest first."""

    def __init__(self, runs: Sequence[RunPeak] = ()) -> None:
        self._runs = {run.id: run for run in runs}

    def add(self, run: RunPeak) -> list[str]:
        """Add a run, and return the ids of those that are removed."""
        self._runs[run.id] = run
        ids = [each.id for each in self._runs.values() if _series_of(each) == _series_of(run)]
        removed = ids[:-MAX_RUNS_OF_WORKLOAD] + list(self._runs)[: max(0, len(self._runs) - MAX_STORED_RUNS)]
        for id in removed:
            self._runs.pop(id, None)
        return removed

    def need(self, workload: str, device_name: str, world_size: int, uid: int | None) -> AutoNeed:
        """Return the size for the next run of a workload; ``uid``: of this user's runs only."""
        peaks = [
            run.peak_bytes
            for run in self._runs.values()
            if (run.workload, run.device_name, run.world_size) == (workload, device_name, world_size)
            and uid in (None, run.uid)
        ]
        return AutoNeed(
            workload=workload,
            device_name=device_name,
            world_size=world_size,
            runs=len(peaks),
            need_bytes=upper_bound(peaks),
            largest_bytes=max(peaks, default=None),
        )


def _series_of(run: RunPeak) -> tuple[int, str, str, int]:
    return run.uid, run.workload, run.device_name, run.world_size


class PeaksPart(Part):
    table = "run_peaks"

    def __init__(self, core: Core) -> None:
        self._table = Table(core.store, "run_peaks", RunPeak, key="id")
        self._peaks = RunPeaks()
        self.loaded = False
        self._in_progress: dict[tuple[ProcessKey, str], RunInProgress] = {}
        self._tasks = Tasks()
        core.provide(RunPeaks, self._peaks)

    async def load(self) -> Sequence[str]:
        for row in await self._table.rows():
            self._peaks.add(row.value)
        self.loaded = True
        return ()

    def act(self, tick: Tick) -> None:
        snapshot = tick.frame.snapshot
        reports = snapshot.reports_by_process
        for process, report in reports.items():
            for uuid in {pool.device_uuid for pool in report.pools}:
                device = snapshot.device(uuid)
                if device is not None:
                    self._follow(snapshot, device, process, report)
        failed = {end.key for end in snapshot.ends if end.ending == "out-of-memory"}
        without_report = [key for key in self._in_progress if key[0] not in reports]
        for key in [key for key in without_report if not snapshot.may_contain(key[0])]:
            run = self._in_progress.pop(key)
            if key[0] not in failed and key[0] not in snapshot.possibly_suspended:  # a run that failed needed more
                self._store(key, run, snapshot.taken_at)

    async def close(self) -> None:
        await self._tasks.finish()

    def _follow(self, snapshot: Snapshot, device: DeviceReading, process: ProcessKey, report: AgentReport) -> None:
        used_bytes, key = snapshot.used_by(process, device), (process, device.uuid)
        before = self._in_progress.get(key)
        if used_bytes is None or not report.workload or (before is None and len(self._in_progress) >= MAX_IN_PROGRESS):
            return
        for pool in report.pools:
            if pool.device_uuid == device.uuid and pool.inside is None:
                # What the driver's count has missed.
                used_bytes += max(0, (pool.peak_held_bytes or 0) - pool.held_bytes)
        if before is None or used_bytes > before.peak_bytes or report.workload != before.workload:
            peak_bytes = max(used_bytes, before.peak_bytes) if before else used_bytes
            self._in_progress[key] = RunInProgress(
                report.uid, report.workload, device.name, report.world_size or 1, peak_bytes
            )

    def _store(self, key: tuple[ProcessKey, str], run: RunInProgress, ended_at: float) -> None:
        process, uuid = key
        peak = RunPeak(id=f"{process.pid}-{process.start_ticks}-{uuid}", ended_at=ended_at, **run._asdict())
        self._tasks.start(self._table.try_put(peak.id, peak, self._peaks.add(peak)))


MIN_RUNS = 3
MAX_RUNS_OF_WORKLOAD = 20
"""Runs of one workload on one kind of device that are kept, the newest."""
QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95% quantiles of Student's t distribution for 1 to 10 degrees of freedom."""
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
    """The size for the next run: 95% of runs need at most ``need_bytes``, which is None with fewer than three runs.

    ``runs`` is the number of earlier runs that were used, ``largest_bytes`` their highest peak.
    """

    workload: str
    device_name: str
    world_size: int
    runs: int
    need_bytes: int | None
    largest_bytes: int | None


def upper_bound(peaks: Sequence[int]) -> int | None:
    """Return the bytes that the next run exceeds with 5% probability; None with fewer than three peaks.

    It is the prediction bound of a normal distribution, and at least the highest peak.
    """
    count = len(peaks)
    if count < MIN_RUNS:
        return None
    mean = sum(peaks) / count
    deviation = sqrt(sum((peak - mean) ** 2 for peak in peaks) / (count - 1))
    quantile = QUANTILES[count - 2] if count - 2 < len(QUANTILES) else NORMAL_QUANTILE
    return max(*peaks, int(mean + quantile * deviation * sqrt(1 + 1 / count)))
