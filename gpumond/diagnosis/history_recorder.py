"""Recorder of the history, with the tracked devices and processes and the falls of their memory. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf, nan
from typing import NamedTuple

from gpumond.diagnosis.detectors import IDLE_GAP_SECONDS, LiveAllocations, PoolPeaks, RiseTimes
from gpumond.diagnosis.growth import Growth, StepCounts
from gpumond.diagnosis.leak_criteria import Leak
from gpumond.diagnosis.patterns import Plateaus, UsePattern
from gpumond.diagnosis.previous_runs import ProgramKey, RunFloors, SawtoothLevels
from gpumond.diagnosis.serving_leak import UpperQuartiles
from gpumond.facts.engines import EngineReading
from gpumond.facts.frame import GrowthLine, Verdict
from gpumond.facts.program import Ending, ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.facts.verdicts import VerdictName
from gpumond.tick.claims import fully_listed_devices, held_bytes_by_device, may_hold_memory, outermost_pools
from gpumond.tick.history import LIVE, STEP_END, UNATTRIBUTED, USED, History, ProcessSeriesKey, Series, SeriesKey

FALL_RATIO = 0.10
OWN_FALL_RATIO = 0.5
EMPTY_RATIO = 0.02
"""A device, or a process that is known by its pid alone, is treated as new when its memory falls by these shares (of
the device, and of its own) in one sample, or to EMPTY_RATIO of the device.
"""
RETURNED_RATIO = 0.5
"""Minimum share of a fall by which the used bytes of the device decrease, so the memory was given back."""
MEASURED_SECONDS = 1800.0
"""Time for which the live bytes at the end of a step are used instead of the sampled ones."""

Evidence = tuple[tuple[str, float], ...]


class _PoolSums(NamedTuple):
    """A report, and the sums over its pools on one device; unknown is None."""

    report: AgentReport
    live_bytes: int | None
    held_bytes: int
    live_allocations: int | None
    stranded_bytes: int
    managed_bytes: int


_SumsByProcess = dict[ProcessKey, _PoolSums]


class TrackedSeries:
    """One tracked device or process. Times are those of the History's clock."""

    __slots__ = (
        "allocations",
        "disagreements",
        "driver_bytes",
        "ending",
        "filling",
        "floors",
        "growth",
        "has_agent_pools",
        "has_retainers",
        "key",
        "leak",
        "peaks",
        "plateaus",
        "quartiles",
        "rises",
        "sampled_at",
        "sawtooth",
        "series",
        "started",
        "steps",
        "uid",
        "used",
        "verdicts",
    )

    def __init__(self, key: SeriesKey, name: str, series: Series) -> None:
        self.key = key
        self.series = series
        series.name = name
        self.started = series.started
        self.sampled_at = -inf
        self.used = nan
        """Bytes of the most reliable signal."""
        self.has_retainers = False
        """True if an agent has found the lines that keep memory."""
        self.driver_bytes = nan
        """Bytes of the process that the driver counts."""
        self.rises = RiseTimes()
        self.has_agent_pools = False
        """True if an agent reports its pools."""
        self.ending: Ending | None = None
        """Ending of the program that its agent reported."""
        self.peaks = PoolPeaks(-inf)
        self.plateaus = Plateaus()
        self.sawtooth = SawtoothLevels()
        self.floors = RunFloors()
        self.uid: int | None = None
        self.quartiles = UpperQuartiles()
        self.leak: Leak | None = None
        self.growth: Growth | None = None
        self.filling: UsePattern | None = None
        self.steps = StepCounts()
        self.allocations = LiveAllocations()
        self.disagreements = 0
        """Number of consecutive minutes with a pattern other than the active one."""
        self.verdicts: dict[str, Verdict] = {}

    @property
    def name(self) -> str:
        return self.series.name

    @property
    def uuid(self) -> str:
        return self.key[0]

    @property
    def process(self) -> ProcessKey | None:
        return self.key[1]

    @property
    def pid(self) -> int | None:
        return self.key[1].pid if self.key[1] else None

    @property
    def program(self) -> ProgramKey:
        return self.name, self.uid

    @property
    def main_signal(self) -> int:
        """Index of the most reliable signal."""
        if self.process is None:
            return UNATTRIBUTED
        if not self.has_agent_pools:
            return USED
        return STEP_END if self.steps.are_measured else LIVE

    def restart(self, now: float) -> None:
        """Discard the earlier curve, as for another process."""
        self.started = now
        self.leak = None
        self.growth = None
        self.steps = StepCounts()
        self.allocations = LiveAllocations()
        self.plateaus = Plateaus()
        self.sawtooth = SawtoothLevels()
        self.floors = RunFloors()
        self.quartiles = UpperQuartiles()

    def verdict(
        self,
        kind: VerdictName,
        since: float,
        evidence: Evidence,
        summary: str,
        time_to_full_seconds: float | None = None,
        form: str = "",
        fit: GrowthLine | None = None,
    ) -> Verdict:
        """Make a verdict on this device or process."""
        return Verdict(
            device_uuid=self.uuid,
            pid=self.pid,
            start_ticks=self.key[1].start_ticks if self.key[1] else None,
            kind=kind,
            since=since,
            evidence=evidence,
            time_to_full_seconds=time_to_full_seconds,
            summary=summary,
            form=form,
            fit=fit,
        )


class Fall(NamedTuple):
    """Memory that was released between two samples: by the end of a process (``ended``), or by a fall that looks like
    one.

    ``emptied``: hardly any memory is left. ``given_back``: most of it is free on the device as a whole.
    ``device_used_bytes``: bytes that were used on the device before.
    """

    tracked: TrackedSeries
    size_bytes: float
    ended: bool
    emptied: bool
    given_back: bool
    device_used_bytes: float


class HistoryRecorder:
    """Records the history of all devices and processes, and the falls of their memory."""

    def __init__(self, speedup: float) -> None:
        self.history = History(speedup)
        self.tracked_series: dict[SeriesKey, TrackedSeries] = {}
        self.due: list[tuple[TrackedSeries, int]] = []
        """Series of which blocks closed with the last snapshot, and the number of these tiers."""
        self.falls: list[Fall] = []
        self.unattributed: dict[str, float] = {}
        """By device, where its processes are listed."""
        self.idle_since: dict[str, float] = {}
        """By device: time since which nothing runs on it."""
        self._used_bytes: dict[str, int] = {}
        self._used_bytes_before: dict[str, int] = {}
        """By device: the used bytes of the last sample."""
        self._decreases: dict[str, int] = {}
        """By device: decrease of the used bytes since the last sample."""

    def record(self, snapshot: Snapshot) -> bool:
        """Add a snapshot, device by device. Return False if it is not newer than the last one."""
        if not self.history.advance(snapshot):
            return False
        self.due, self.falls = [], []
        pools = _pool_sums_by_device(snapshot)
        fully_listed = fully_listed_devices(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
        present, answered = set(), set()
        for device in snapshot.devices:
            present.add(device.uuid)
            # A device that did not answer says nothing about its memory and its processes.
            if not device.missed_readings and device.used_bytes is not None:
                confirmed = _confirmed_pool_sums(device, pools.get(device.uuid, {}), device.uuid in fully_listed)
                self._add_device(device, confirmed, _engine_load(device, snapshot.engines))
                answered.add(device.uuid)
        for each in snapshot.suspensions:
            if each.confirmed and each.device_uuid in answered:
                self._add_suspended((each.device_uuid, each.process))
        self._end_missing_processes(answered, snapshot.possibly_suspended)
        for key in [key for key in self.tracked_series if key[0] not in present]:
            self._remove(self.tracked_series.pop(key))
        return True

    def _add_device(self, device: DeviceReading, pool_sums: _SumsByProcess, load: float) -> None:
        history, uuid, now, device_bytes = self.history, device.uuid, self.history.now, device.size_bytes or 0
        used = device.used_bytes or 0
        self._used_bytes_before[uuid] = self._used_bytes.get(uuid, used)
        self._decreases[uuid] = self._used_bytes_before[uuid] - used
        self._used_bytes[uuid] = used
        counted = {process: sums for process, sums in pool_sums.items() if sums.live_bytes is not None}
        live: float
        held: float
        stranded: float
        if counted:
            live = sum(sums.live_bytes or 0 for sums in counted.values())
            held = sum(sums.held_bytes for sums in counted.values())
            stranded = sum(sums.stranded_bytes for sums in counted.values())
        else:
            live = held = stranded = 0 if device.processes == () and not pool_sums else nan
        listed = device.processes_by_key
        opaque = sum(listed[key].used_bytes or 0 for key in listed.keys() - counted.keys())
        attributed = 0
        managed = sum(sums.managed_bytes for sums in pool_sums.values())
        for process, usage in listed.items():
            attributed += self._add_process((uuid, process), usage, pool_sums.pop(process, None), device_bytes)
        for process, sums in pool_sums.items():
            attributed += self._add_process((uuid, process), None, sums, device_bytes)
        tracked = self.tracked_series.get((uuid, None))
        if tracked is None:
            tracked = self.tracked_series[uuid, None] = TrackedSeries((uuid, None), "", history.device_series(uuid))
        if now - tracked.sampled_at > IDLE_GAP_SECONDS * history.speedup:
            self.idle_since.pop(uuid, None)
        tracked.sampled_at = now
        unattributed = float(max(0, used - attributed - managed))
        if device.processes is None:
            self._record_fall(tracked, tracked.used, unattributed, device_bytes)
            self.unattributed.pop(uuid, None)
        else:
            self.unattributed[uuid] = unattributed
        tracked.used = unattributed
        utilization = device.sensors.gpu_utilization_ratio
        if utilization == 0:
            self.idle_since.setdefault(uuid, now)
        else:
            self.idle_since.pop(uuid, None)
        closed_tiers = tracked.series.add(
            (
                now,
                used,
                live,
                held,
                stranded,
                nan,
                nan if utilization is None else utilization,
                unattributed,
                opaque,
                load,
            )
        )
        if closed_tiers:
            self.due.append((tracked, closed_tiers))

    def _add_process(
        self, key: ProcessSeriesKey, process: ProcessUsage | None, sums: _PoolSums | None, device_bytes: float
    ) -> int:
        """Add one process on one device. Return the bytes of the device that it is known to use."""
        driver_bytes = process.used_bytes if process is not None else None
        if driver_bytes is None and sums is None:
            return 0
        if sums is not None and sums.live_bytes is None:  # only the driver's count shows how its memory grows
            if driver_bytes is None:
                return sums.held_bytes
            sums = None
        tracked = self.tracked_series.get(key) or self._begin_series(key, process, sums)
        if tracked is None:
            return driver_bytes or 0
        now = self.history.now
        tracked.sampled_at = now
        if driver_bytes is not None:
            has_known_start = key[1].start_ticks is not None
            if driver_bytes < tracked.driver_bytes and (has_known_start or sums is None):
                self._record_fall(tracked, tracked.driver_bytes, float(driver_bytes), device_bytes, has_known_start)
            tracked.rises.add(driver_bytes, self._used_bytes[key[0]], device_bytes, now)
            tracked.driver_bytes = float(driver_bytes)
        if sums is None:
            if tracked.has_agent_pools:
                tracked.has_agent_pools = False
                tracked.steps.add(None, False, now, 0.0)
            tracked.used = float(driver_bytes or 0)
            closed_tiers = tracked.series.add((now, tracked.used))
        else:
            report, live, held, allocations, stranded, _ = sums
            if not tracked.has_agent_pools and tracked.started < now:
                tracked.restart(now)  # another signal is used from now on
            tracked.has_agent_pools, measured = True, tracked.steps.are_measured
            step = report.program.step
            uses_one_device = step is not None and len({pool.device_uuid for pool in report.pools}) == 1
            step_end = tracked.steps.add(step, uses_one_device, now, MEASURED_SECONDS)
            if tracked.steps.are_measured != measured:
                tracked.plateaus, tracked.sawtooth, tracked.floors = Plateaus(), SawtoothLevels(), RunFloors()
            tracked.series.name = report.workload or tracked.name
            tracked.used = nan if live is None else float(live)
            tracked.has_retainers = bool(report.program.retainers)
            tracked.peaks.add(report, key[0], now)
            row = (now, nan if driver_bytes is None else driver_bytes, tracked.used, held, stranded)
            closed_tiers = tracked.series.add((*row, step_end) if tracked.steps.are_measured else row)
            if allocations is not None or closed_tiers:
                tracked.allocations.add(allocations, closed_tiers > 0)
        if closed_tiers:
            self.due.append((tracked, closed_tiers))
        if driver_bytes is not None:
            return driver_bytes
        return 0 if sums is None else held_bytes_by_device(sums.report.pools).get(key[0], 0)

    def _begin_series(
        self, key: ProcessSeriesKey, process: ProcessUsage | None, sums: _PoolSums | None
    ) -> TrackedSeries | None:
        series = self.history.process_series(key)
        if series is None:
            return None
        name = sums.report.workload if sums is not None else ""
        if process is not None:
            name = name or process.comm or ""
            if process.state not in ("gone", "zombie"):
                # Memory that a new process allocated was released by an ended one.
                self._decreases[key[0]] += process.used_bytes or 0
        tracked = self.tracked_series[key] = TrackedSeries(key, name, series)
        tracked.uid = sums.report.uid if sums is not None else process.uid if process is not None else None
        return tracked

    def _add_suspended(self, key: ProcessSeriesKey) -> None:
        """Add that a suspended process uses nothing. Its pools have no sample: they say nothing about its memory."""
        tracked = self.tracked_series.get(key)
        if tracked is not None and tracked.has_agent_pools and tracked.sampled_at != self.history.now:
            tracked.series.add((self.history.now, 0.0))

    def _end_missing_processes(self, devices: set[str], suspended: Collection[ProcessKey]) -> None:
        """End the processes on those devices that the snapshot does not contain, except suspended ones."""
        now = self.history.now
        gone = [
            tracked
            for (uuid, process), tracked in self.tracked_series.items()
            if tracked.sampled_at != now and process is not None and uuid in devices and process not in suspended
        ]
        for tracked in gone:
            del self.tracked_series[tracked.key]
            size = _last_known_bytes(tracked)
            uuid = tracked.uuid
            given_back = self._decreases[uuid] >= RETURNED_RATIO * size
            self.falls.append(Fall(tracked, size, True, True, given_back, self._used_bytes_before[uuid]))
            self._remove(tracked)

    def _remove(self, tracked: TrackedSeries) -> None:
        uuid, process = tracked.key
        if process is None:
            self.history.forget(uuid)
            self.unattributed.pop(uuid, None)
            self.idle_since.pop(uuid, None)
            self._used_bytes.pop(uuid, None)
        else:
            self.history.end((uuid, process))

    def _record_fall(
        self, tracked: TrackedSeries, before: float, used: float, device_bytes: float, lives_on: bool = False
    ) -> None:
        """Record a fall. ``lives_on``: the process is known to be the same, and has freed its memory."""
        if not used < before or not device_bytes:
            return
        far = before - used > FALL_RATIO * device_bytes and used < OWN_FALL_RATIO * before
        if far or used < EMPTY_RATIO * device_bytes <= before:
            fall = before - used
            self.falls.append(
                Fall(
                    tracked,
                    fall,
                    False,
                    lives_on or used < EMPTY_RATIO * device_bytes,
                    self._decreases[tracked.uuid] >= RETURNED_RATIO * fall,
                    self._used_bytes_before[tracked.uuid],
                )
            )
            if not lives_on:
                tracked.restart(self.history.now)


def _last_known_bytes(tracked: TrackedSeries) -> float:
    """Return the last known memory of the process."""
    values = [value for value in tracked.series.rows.newest_rows(1) if value == value]
    return max(values, default=0.0)


def _confirmed_pool_sums(device: DeviceReading, pool_sums: _SumsByProcess, is_fully_listed: bool) -> _SumsByProcess:
    counts = device.used_by_process
    return {process: sums for process, sums in pool_sums.items() if may_hold_memory(counts, process, is_fully_listed)}


def _pool_sums_by_device(snapshot: Snapshot) -> dict[str, _SumsByProcess]:
    """Return the reports of programs that use a device, and the sums of their pools, by device and process."""
    table: dict[str, _SumsByProcess] = {}
    for process, report in snapshot.reports_by_process.items():
        for pool in outermost_pools(report.pools) if report.uses_device else ():
            by_process = table.setdefault(pool.device_uuid, {})
            before = by_process.get(process)
            held, live, allocations = pool.held_bytes, pool.live_bytes, pool.live_allocations
            stranded, managed = max(0, held - (live or 0) - pool.reclaimable.likely), held if pool.managed else 0
            if before is not None:
                live = None if before.live_bytes is None or live is None else before.live_bytes + live
                allocations = (
                    None
                    if before.live_allocations is None or allocations is None
                    else before.live_allocations + allocations
                )
                held, stranded = before.held_bytes + held, before.stranded_bytes + stranded
                managed += before.managed_bytes
            by_process[process] = _PoolSums(report, live, held, allocations, stranded, managed)
    return table


def _engine_load(device: DeviceReading, engines: Iterable[EngineReading]) -> float:
    """Return the requests of the engines on a device, or the used part of their KV caches; NaN without one."""
    keys = device.processes_by_key
    serving = [one for one in engines if one.up and any(process.key in keys for process in one.processes)]
    requests = [one.running + (one.waiting or 0) for one in serving if one.running is not None]
    return sum(requests) if requests else sum(one.kv_cache_used_ratio or 0.0 for one in serving) if serving else nan
