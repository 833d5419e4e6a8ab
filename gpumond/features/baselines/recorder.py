"""Stored baselines, and recordings in progress, which follow the daemon's frames."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from gpumond.core import Core, Part, Tick
from gpumond.facts.errors import EntryConflict, NoSuchEntry, StoreUnavailable
from gpumond.facts.frame import Frame, LedgerLine
from gpumond.facts.pools import Receipt
from gpumond.facts.program import ProcessKey
from gpumond.features.baselines.statistics import (
    MEASURES,
    Baseline,
    Comparison,
    MeasureDistribution,
    Periods,
    WorkloadMeasures,
    compare,
)
from gpumond.store.store import Store
from gpumond.store.table import AuditActions, Table

Side = Literal["before", "after"]

MAX_BASELINES = 100
MAX_TABLE_BYTES = 8 * 1024**2


def baseline_table(store: Store, side: Side) -> Table[Baseline]:
    """Return the store's table of baselines, or of the last measurement that was compared with each."""
    return Table(
        store, "baselines", Baseline, second_key=("side", side), actions=AuditActions(delete="baseline.delete")
    )


class BaselineService:
    """One recording at a time for each name and side. A recording in progress is lost when the daemon ends."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: Mapping[Side, Table[Baseline]] = {side: baseline_table(store, side) for side in SIDES}
        self._recordings: dict[tuple[str, Side], BaselineRecorder] = {}
        self._saving: asyncio.Task[None] | None = None

    def add(self, frame: Frame) -> None:
        """Add the frame of a tick; never blocks."""
        for recording in self._recordings.values():
            if not recording.complete:
                recording.add(frame)
        if any(each.complete for each in self._recordings.values()) and (self._saving is None or self._saving.done()):
            self._saving = asyncio.ensure_future(self._save())

    async def close(self) -> None:
        """Wait for the baseline that is being written, if any."""
        if self._saving is not None:
            await self._saving

    def add_receipt(self, receipt: Receipt) -> None:
        for recording in self._recordings.values():
            if not recording.complete:
                recording.add_receipt(receipt)

    async def record(self, name: str, for_seconds: float, workload: str | None, requested_by: str) -> None:
        """Record a baseline; one of that name is replaced at the end. Raises StoreUnavailable, EntryConflict."""
        rows, size_bytes = await self._tables["before"].rows_and_bytes()
        if rows >= 2 * MAX_BASELINES or size_bytes >= MAX_TABLE_BYTES:
            raise EntryConflict("there are too many baselines; delete one that is no longer needed")
        detail = {"name": name, "for_seconds": for_seconds, "workload": workload}
        await self._store.audit(requested_by, "baseline.record", detail)
        self._recordings[name, "before"] = BaselineRecorder(name, for_seconds, workload)

    async def measure_again(self, name: str, for_seconds: float, requested_by: str) -> None:
        """Record the side that ``comparison`` compares with. Raises NoSuchEntry, StoreUnavailable."""
        before = await self._stored("before", name)
        await self._store.audit(requested_by, "baseline.compare", {"name": name, "for_seconds": for_seconds})
        self._recordings[name, "after"] = BaselineRecorder(name, for_seconds, before.workload)

    async def baselines(self) -> list[Baseline]:
        """Return all baselines; those in progress are not complete."""
        stored = {row.name: row.value for row in await self._tables["before"].rows()}
        recordings = {name: _unsaved(each) for (name, side), each in self._recordings.items() if side == "before"}
        return [baseline for _, baseline in sorted((stored | recordings).items())]

    async def get(self, name: str) -> Baseline:
        """Return a baseline. Raises NoSuchEntry."""
        recording = self._recordings.get((name, "before"))
        return _unsaved(recording) if recording else await self._stored("before", name)

    async def comparison(self, name: str, other: str | None = None) -> Comparison:
        """Compare with another baseline, or with the last or the present second recording. Raises NoSuchEntry."""
        before = await self._stored("before", name)
        if other is not None:
            return compare(before, await self._stored("before", other))
        recording = self._recordings.get((name, "after"))
        return compare(before, _unsaved(recording) if recording else await self._stored("after", name))

    async def delete(self, name: str, requested_by: str) -> None:
        """Delete a baseline. Raises NoSuchEntry."""
        stopped = [self._recordings.pop((name, side), None) for side in SIDES]
        if not await self._tables["before"].delete(name, requested_by) and not any(stopped):
            raise _no_baseline_error("before", name)

    async def _stored(self, side: Side, name: str) -> Baseline:
        rows = await self._tables[side].rows(name)
        if not rows:
            raise _no_baseline_error(side, name)
        return rows[0].value

    async def _save(self) -> None:
        """Store the complete recordings. The store logs its errors, and the next tick tries again."""
        with suppress(StoreUnavailable):
            for (name, side), recording in list(self._recordings.items()):
                if recording.complete:
                    outdated = (name,) if side == "before" else ()  # what was compared with the previous baseline
                    await self._tables[side].put(name, recording.baseline(), removed=outdated)
                    current = self._recordings.get((name, side))
                    if current is recording:
                        del self._recordings[name, side]
                    elif current is None:  # it was deleted meanwhile
                        await self._tables["before"].delete(name, "gpumond")


SIDES: tuple[Side, Side] = ("before", "after")


def _unsaved(recording: BaselineRecorder) -> Baseline:
    """Return a recording in progress; it is complete once it is stored."""
    baseline = recording.baseline()
    return replace(baseline, complete=False) if baseline.complete else baseline


def _no_baseline_error(side: Side, name: str) -> NoSuchEntry:
    if side == "before":
        return NoSuchEntry(f"there is no baseline {name}; to record it: gpumond baseline record {name} --for 10m")
    return NoSuchEntry(
        f"there is no measurement to compare {name} with; to start one: gpumond baseline compare {name} --for 10m"
    )


MEASURES_OF_SHARE = {
    "live": ("live", "held"),
    "cached": ("reclaimable", "held"),
    "stranded": ("stranded", "held"),
    "overhead": ("overhead",),
    "opaque": (),
}
"""Measures to which a share of the ledger adds, besides ``used``. No other share is recorded."""

MAX_WORKLOADS = 64

RetryCounter = tuple[ProcessKey, str, str]
"""Process, allocator and device UUID"""


@dataclass(slots=True)
class _WorkloadRecording:
    seconds: float = 0.0
    periods: dict[str, Periods] = field(default_factory=lambda: defaultdict(Periods))
    devices: set[str] = field(default_factory=set)
    first_retries: dict[RetryCounter, int] = field(default_factory=dict)
    last_retries: dict[RetryCounter, int] = field(default_factory=dict)
    flushes: int = 0


class BaselineRecorder:
    """Recording of ``for_seconds`` from the first frame on; ``workload`` None records all of them."""

    def __init__(self, name: str, for_seconds: float, workload: str | None = None) -> None:
        self.name, self.for_seconds, self.workload = name, for_seconds, workload
        self._started: tuple[float, float] | None = None
        self._now = 0.0
        self._workloads: dict[str, _WorkloadRecording] = {}

    @property
    def complete(self) -> bool:
        return self._started is not None and self._now - self._started[1] >= self.for_seconds

    def add(self, frame: Frame) -> None:
        """Add a frame. A device that did not answer adds nothing, and neither does a workload on it."""
        now = frame.snapshot.elapsed_seconds
        passed_seconds = now - self._now if self._started else 0.0
        self._started = self._started or (frame.snapshot.taken_at, now)
        self._now = now
        missing_devices = {device.uuid for device in frame.snapshot.devices if device.missed_readings}
        for name, lines in self._lines_by_workload(frame).items():
            if name not in self._workloads and len(self._workloads) >= MAX_WORKLOADS:
                continue
            workload = self._workloads.setdefault(name, _WorkloadRecording())
            workload.devices = {line.device_uuid for line in lines}
            if workload.devices & missing_devices:
                continue
            workload.seconds += passed_seconds
            for measure, value in _measure_sums(lines).items():
                workload.periods[measure].add(value)
            utilizations = [
                device.sensors.gpu_utilization_ratio
                for device in frame.snapshot.devices
                if device.uuid in workload.devices and device.sensors.gpu_utilization_ratio is not None
            ]
            if utilizations:
                workload.periods["utilization"].add(sum(utilizations) / len(utilizations))
        self._count_retries(frame)

    def add_receipt(self, receipt: Receipt) -> None:
        workload = self._workloads.get(receipt.workload)
        if workload is not None and receipt.outcome not in ("planned", "refused"):
            workload.flushes += 1
            workload.periods["flush_yield"].add(float(receipt.released_bytes))

    def baseline(self) -> Baseline:
        """Return the baseline recorded so far."""
        started_at, since = self._started or (0.0, 0.0)
        workloads = tuple(_workload_measures(name, self._workloads[name]) for name in sorted(self._workloads))
        return Baseline(
            self.name, self.workload, started_at, self.for_seconds, self._now - since, self.complete, workloads
        )

    def _lines_by_workload(self, frame: Frame) -> dict[str, list[LedgerLine]]:
        """Return the lines by workload. A program without an agent is named by its command."""
        names = {
            (device.uuid, key): f"[{process.comm}]"
            for device in frame.snapshot.devices
            for key, process in device.processes_by_key.items()
            if process.comm
        }
        lines_by_workload: dict[str, list[LedgerLine]] = {}
        for line in frame.ledger.lines:
            name = line.workload or (names.get((line.device_uuid, line.process), "") if line.process else "")
            if name and line.share in MEASURES_OF_SHARE and self.workload in (None, name):
                lines_by_workload.setdefault(name, []).append(line)
        return lines_by_workload

    def _count_retries(self, frame: Frame) -> None:
        for process, report in frame.snapshot.reports_by_process.items():
            workload = self._workloads.get(report.workload)
            for pool in report.pools if workload else ():
                if workload is not None and pool.retries is not None:
                    counter = (process, pool.allocator, pool.device_uuid)
                    workload.first_retries.setdefault(counter, pool.retries)
                    workload.last_retries[counter] = pool.retries


def _measure_sums(lines: list[LedgerLine]) -> dict[str, float]:
    """Return the sums of the measures; without an agent only ``used`` is known."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        sums["used"] += line.used_bytes
        for measure in MEASURES_OF_SHARE[line.share]:
            sums[measure] += line.used_bytes
    return sums


def _workload_measures(name: str, workload: _WorkloadRecording) -> WorkloadMeasures:
    measured = tuple(
        MeasureDistribution(measure, distribution)
        for measure in MEASURES
        if measure in workload.periods and (distribution := workload.periods[measure].distribution()) is not None
    )
    retries = sum(last - workload.first_retries[counter] for counter, last in workload.last_retries.items())
    return WorkloadMeasures(
        name, workload.seconds, measured, retries if workload.last_retries else None, workload.flushes
    )


class BaselinesPart(BaselineService, Part):
    def __init__(self, core: Core) -> None:
        super().__init__(core.store)
        core.provide(BaselineService, self)

    def act(self, tick: Tick) -> None:
        self.add(tick.frame)
