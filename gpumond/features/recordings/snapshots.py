"""Conversion of the rows of a log to the snapshots that a daemon would have taken.

A snapshot is complete when a series occurs again, or when half an interval has passed. Values that the
log does not contain are unknown. A process that is no longer listed has ended; if its pid occurs again,
it is another process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gpumond.facts.errors import ConfigError
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Sensors, Snapshot, SourceState
from gpumond.features.recordings.reader import LogLines, LogRow, Remarks

SnapshotReader = Callable[[LogLines, Remarks, int | None, float | None], Iterator[Snapshot]]
"""From lines, remarks, the capacity of devices without one, and the seconds between readings without times."""


@dataclass(frozen=True, slots=True)
class Format:
    """One importer. ``detect`` is called with the first line of a log; ``read`` raises ConfigError."""

    name: str
    detect: Callable[[str], bool]
    read: SnapshotReader


RowReader = Callable[[LogLines, Remarks, float | None], Iterator[LogRow]]


def snapshot_reader(read_rows: RowReader, lists_all_processes: bool = False) -> SnapshotReader:
    """Return the reader of a format with a row for each device and process, in any order.

    ``lists_all_processes``: every reading of a device lists all of its processes.
    """

    def read(
        lines: LogLines, remarks: Remarks, size_bytes: int | None, interval_seconds: float | None
    ) -> Iterator[Snapshot]:
        builder = SnapshotBuilder(remarks, size_bytes, lists_all_processes)
        return builder.snapshots(read_rows(lines, remarks, interval_seconds))

    return read


LOG_SOURCE = SourceState(name="log", up=True, responsive=True)
UNKNOWN_PID = 2**31 - 1
"""The pid of a program whose pool is in the log without a pid. No system has a pid this large."""
FRESH_INTERVALS = 2.5
"""Number of its own intervals for which a series is assumed to exist after its last row."""
MIN_IN_STEP = 3
"""Snapshots with both a process and its device, after which a process that is absent from one has ended."""
GAP_INTERVALS = 5.0
MAX_MISSED_READINGS = 2

SeriesKey = tuple[str, int | None]


@dataclass(slots=True)
class _Series:
    row: LogRow
    updated_at: float
    interval_seconds: float | None = None
    pid_reuses: int = 0
    in_step: int = 0
    """Number of consecutive snapshots that contained it, at exactly their time."""
    ended: bool = False

    def update(self, row: LogRow, updated_at: float) -> None:
        self.interval_seconds = _smoothed_interval(self.interval_seconds, updated_at - self.updated_at)
        self.row, self.updated_at = row, updated_at
        self.pid_reuses += self.ended
        self.ended = False

    def is_fresh(self, now: float, log_interval: float | None) -> bool:
        interval = self.interval_seconds or log_interval or 1.0
        return not self.ended and now - self.updated_at <= FRESH_INTERVALS * interval


def _smoothed_interval(interval: float | None, latest: float) -> float:
    """Return the usual interval after the latest one, of which a long one counts as three."""
    return latest if interval is None else interval + 0.2 * (min(latest, 3 * interval) - interval)


@dataclass(slots=True)
class _Device:
    index: int
    name: str = ""
    size_bytes: int | None = None
    missed: int = 0
    reading: DeviceReading | None = None
    pids: frozenset[int] | None = None


class SnapshotBuilder:
    """Builder of snapshots. ``lists_all_processes``: every reading of a device lists all of its processes."""

    def __init__(self, remarks: Remarks, size_bytes: int | None = None, lists_all_processes: bool = False) -> None:
        self._remarks, self._size_bytes, self._lists_all_processes = remarks, size_bytes, lists_all_processes
        self._devices: dict[str, _Device] = {}
        self._series: dict[SeriesKey, _Series] = {}
        self._seq = 0
        self._elapsed_seconds = 0.0
        self._interval_seconds: float | None = None
        self._gap_seconds = 0.0

    def snapshots(self, rows: Iterable[LogRow]) -> Iterator[Snapshot]:
        snapshot_rows: dict[SeriesKey, LogRow] = {}
        started = max_distance = 0.0
        for now, row in RowSorter(self._remarks).in_order(rows):
            key = (row.device, row.pid)
            previous = snapshot_rows.get(key)
            if previous is not None and previous.at == row.at:
                self._remarks.duplicates += 1
                continue
            if snapshot_rows and (previous is not None or now - started > max_distance):
                yield self._snapshot(started, snapshot_rows)
                snapshot_rows = {}
            if not snapshot_rows:
                started, max_distance = now, 0.5 * self._interval(key)
            snapshot_rows[key] = row
        if snapshot_rows:
            yield self._snapshot(started, snapshot_rows)

    def _snapshot(self, elapsed_seconds: float, rows: dict[SeriesKey, LogRow]) -> Snapshot:
        now = self._advance_clock(elapsed_seconds)
        at = next(iter(rows.values())).at
        for key, row in rows.items():
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = _Series(row, now)
            else:
                series.update(row, now)
            series.in_step = series.in_step + 1 if row.at == at else 0
            self._update_device(row)
        # the devices in them, and others that may still be there
        present_uuids = {device for device, _ in rows}
        readings: list[DeviceReading] = []
        reports: list[AgentReport] = []
        for uuid, device in list(self._devices.items()):
            if uuid in present_uuids:
                device.missed = 0
                self._end_absent_processes(uuid, device, rows, now)
                device.reading = self._reading(uuid, device, reports)
            else:
                device.missed += 1
                if not self._is_present(uuid, device, now):
                    self._end_series(uuid, device, None, *(device.pids or ()))
                    device.reading = None
                    continue
                if device.reading is not None:
                    device.reading = replace(device.reading, missed_readings=min(device.missed, MAX_MISSED_READINGS))
                    self._add_reports(uuid, device, reports)
            if device.reading is not None:
                readings.append(device.reading)
        self._seq += 1
        return Snapshot(
            seq=self._seq,
            taken_at=at,
            elapsed_seconds=elapsed_seconds,
            source=LOG_SOURCE,
            devices=tuple(readings),
            reports=tuple(reports),
        )

    def _interval(self, key: SeriesKey) -> float:
        series = self._series.get(key)
        return (series.interval_seconds if series and not series.ended else None) or 1.0

    def _advance_clock(self, now: float) -> float:
        """Return the seconds during which the log was written. A gap in the log does not end a process."""
        passed = now - self._elapsed_seconds
        if self._seq == 1:
            self._interval_seconds = passed
        elif self._interval_seconds is not None:
            if passed > GAP_INTERVALS * self._interval_seconds:
                self._gap_seconds += passed - self._interval_seconds
            self._interval_seconds = _smoothed_interval(self._interval_seconds, passed)
        self._elapsed_seconds = now
        return now - self._gap_seconds

    def _update_device(self, row: LogRow) -> None:
        device = self._devices.get(row.device)
        if device is None:
            index = len(self._devices) if row.gpu is None else row.gpu
            device = self._devices[row.device] = _Device(index, size_bytes=self._size_bytes)
        if row.size_bytes is not None:
            device.size_bytes = row.size_bytes
        if row.pid is None:
            device.name = row.name or device.name
        elif device.pids is None or row.pid not in device.pids:
            device.pids = (device.pids or frozenset()) | {row.pid}

    def _end_absent_processes(self, uuid: str, device: _Device, rows: dict[SeriesKey, LogRow], now: float) -> None:
        for pid in device.pids or ():
            series = self._series[uuid, pid]
            if (uuid, pid) not in rows:
                has_ended = self._lists_all_processes or series.in_step >= MIN_IN_STEP
                if has_ended or not series.is_fresh(now, self._interval_seconds):
                    self._end_series(uuid, device, pid)
                series.in_step = 0

    def _end_series(self, uuid: str, device: _Device, *pids: int | None) -> None:
        for pid in pids:
            if (uuid, pid) in self._series:
                self._series[uuid, pid].ended = True
        if device.pids is not None:
            device.pids -= set(pids)

    def _is_present(self, uuid: str, device: _Device, now: float) -> bool:
        keys: list[SeriesKey] = [(uuid, None), *((uuid, pid) for pid in device.pids or ())]
        return any(key in self._series and self._series[key].is_fresh(now, self._interval_seconds) for key in keys)

    def _reading(self, uuid: str, device: _Device, reports: list[AgentReport]) -> DeviceReading:
        device_series = self._series.get((uuid, None))
        if device_series is not None and not device_series.is_fresh(
            self._elapsed_seconds - self._gap_seconds, self._interval_seconds
        ):
            device_series = None
        processes = [(pid, self._series[uuid, pid]) for pid in sorted(device.pids or ())]
        utilization = device_series.row.utilization_ratio if device_series else None
        if utilization is None:
            ratios = (series.row.utilization_ratio for _, series in processes)
            utilization = max((ratio for ratio in ratios if ratio is not None), default=None)
        self._add_reports(uuid, device, reports)
        return DeviceReading(
            uuid=uuid,
            index=device.index,
            name=device.name,
            size_bytes=device.size_bytes,
            used_bytes=self._used_bytes(device_series, processes),
            processes=None if device.pids is None else tuple(_process(pid, series) for pid, series in processes),
            sensors=Sensors(gpu_utilization_ratio=utilization),
        )

    def _used_bytes(self, device_series: _Series | None, processes: list[tuple[int, _Series]]) -> int | None:
        if device_series is not None and device_series.row.used_bytes is not None:
            return device_series.row.used_bytes
        process_bytes = [
            used for _, series in processes if (used := series.row.used_bytes or series.row.held_bytes) is not None
        ]
        if not process_bytes and device_series is not None and device_series.row.live_bytes is not None:
            self._remarks.note(
                "pool", "the log has no used memory for a device: its allocators' memory is used instead"
            )
            return max(device_series.row.live_bytes, device_series.row.held_bytes or 0)
        if process_bytes:
            self._remarks.note(
                "sum", "the log has no used memory for a device: the sum of its processes is used instead"
            )
        return sum(process_bytes) if process_bytes else None

    def _add_reports(self, uuid: str, device: _Device, reports: list[AgentReport]) -> None:
        for pid in (None, *sorted(device.pids or ())):
            series = self._series.get((uuid, pid))
            if series is not None and not series.ended and series.row.live_bytes is not None:
                reports.append(_report(uuid, UNKNOWN_PID if pid is None else pid, series))


def _process(pid: int, series: _Series) -> ProcessUsage:
    """Return the usage of a process. A log has no start_ticks, so reuses of its pid are counted instead."""
    return ProcessUsage(
        pid=pid,
        start_ticks=series.pid_reuses,
        used_bytes=series.row.used_bytes,
        kinds=("compute",),
        comm=series.row.name or None,
    )


def _report(uuid: str, pid: int, series: _Series) -> AgentReport:
    """Return the report of a pool. Held memory that is not live may be cached or stranded. A log does not distinguish
    them, so none is known to be reclaimable, and fragmentation is diagnosed at the peaks."""
    live = series.row.live_bytes or 0
    held = max(live, series.row.held_bytes or live)
    pool = PoolUsage(
        allocator="unknown",
        device_uuid=uuid,
        live_bytes=live,
        held_bytes=held,
        reclaimable=Reclaimable(0, 0, held - live, "interval"),
        stranded_bytes=held - live,
    )
    return AgentReport(
        pid=pid,
        start_ticks=series.pid_reuses,
        uid=0,
        workload=series.row.name,
        age_seconds=0.0,
        frameworks=(),
        flush_policy="never",
        pools=(pool,),
    )


REORDER_SECONDS = 5.0
"""Distance up to which rows may be out of order."""
JUMP_SECONDS = 3600.0
MAX_BACKWARD_STEPS = 50


class RowSorter:
    """Sorter of rows. ``in_order`` yields each row with its seconds since the start, which never decrease."""

    def __init__(self, remarks: Remarks) -> None:
        self._remarks = remarks
        self._waiting: list[tuple[float, int, LogRow]] = []
        self._pending: list[LogRow] = []
        self._first_pending: dict[tuple[str, int | None], LogRow] = {}
        self._backward_steps = 0
        self._newest: float | None = None
        self._count = 0
        self._elapsed = 0.0
        self._step = 1.0
        self._offset: float | None = None

    def in_order(self, rows: Iterable[LogRow]) -> Iterator[tuple[float, LogRow]]:
        for row in rows:
            newest = self._newest
            if newest is None or newest - REORDER_SECONDS <= row.at <= newest + JUMP_SECONDS:
                if self._pending:
                    self._remarks.strays += len(self._pending)
                    self._drop_pending()
                self._enqueue(row)
                yield from self._rows_until(max(row.at, newest or row.at) - REORDER_SECONDS)
            else:
                yield from self._jump(row)
        yield from self._rows_until(float("inf"))
        if self._pending:
            self._check_direction(3)
            yield from self._restart(self._pending)

    def _enqueue(self, row: LogRow) -> None:
        self._count += 1
        self._newest = row.at if self._newest is None else max(self._newest, row.at)
        heapq.heappush(self._waiting, (row.at, self._count, row))

    def _rows_until(self, until: float) -> Iterator[tuple[float, LogRow]]:
        while self._waiting and self._waiting[0][0] <= until:
            at, _, row = heapq.heappop(self._waiting)
            if self._offset is None:
                self._offset = self._elapsed - at
            now = at + self._offset
            if now > self._elapsed:
                self._step, self._elapsed = now - self._elapsed, now
            yield self._elapsed, row

    def _jump(self, row: LogRow) -> Iterator[tuple[float, LogRow]]:
        """Continue from the time of the pending rows, once a series has continued there."""
        self._pending.append(row)
        first_row = self._first_pending.setdefault((row.device, row.pid), row)
        if first_row.at < row.at:
            yield from self._rows_until(float("inf"))
            earliest = first_row.at - REORDER_SECONDS
            yield from self._restart([each for each in self._pending if earliest <= each.at <= row.at])
        elif first_row.at > row.at:
            self._backward_steps += 1
            self._check_direction(MAX_BACKWARD_STEPS)

    def _check_direction(self, max_backward_steps: int) -> None:
        if self._backward_steps > max_backward_steps:
            raise ConfigError(
                f"{self._remarks.name}, line {self._pending[0].line}: time decreases from this line on;"
                " sort the log by time first"
            )

    def _drop_pending(self) -> None:
        self._pending, self._first_pending, self._backward_steps = [], {}, 0

    def _restart(self, rows: list[LogRow]) -> Iterator[tuple[float, LogRow]]:
        self._remarks.strays += len(self._pending) - len(rows)
        earliest = min(row.at for row in rows)
        if self._newest is not None and earliest < self._newest:
            self._remarks.note(
                "back", f"line {rows[0].line}: the log's clock was set back; time continues from the last reading"
            )
            self._elapsed, self._offset = self._elapsed + self._step, None
        self._drop_pending()
        self._newest = None
        for row in rows:
            self._enqueue(row)
        yield from self._rows_until((self._newest or 0.0) - REORDER_SECONDS)
