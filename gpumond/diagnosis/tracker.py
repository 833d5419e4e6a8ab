"""What of a snapshot goes into the History, and who came and went with it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan
from typing import NamedTuple

from gpumond.diagnosis.tracked_series import Key, TrackedSeries
from gpumond.history import History, Life
from gpumond.model.claims import borne_out, complete_lists, listed, outermost
from gpumond.model.cooperative import Steps
from gpumond.model.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot

FALL = 0.10
FALL_SHARE = 0.5
EMPTY = 0.02
"""A device, or a process that is known by its pid alone, begins anew when it falls by so much of the device's size
and of its own memory in one sample, or to so little."""
RETURNED = 0.5


_Report = tuple[AgentReport, int, int]
"""With live and held bytes, summed over its pools on one device."""
_Reports = dict[tuple[int, int | None], _Report]


class Fall(NamedTuple):
    """Memory that was held no more from one sample to the next: by the end of a life (``ended``), or as if by one.

    ``emptied``: hardly any is left. ``given_back``: the device as a whole has got most of it.
    """

    watch: TrackedSeries
    size_bytes: float
    ended: bool
    emptied: bool
    given_back: bool


class Tracker:
    """Every device and life that is followed."""

    def __init__(self, pace: float) -> None:
        self.history = History(pace)
        self.watches: dict[Key, TrackedSeries] = {}
        self.due: list[tuple[TrackedSeries, int]] = []
        """Those of whom blocks closed with the last snapshot, and of how many tiers."""
        self.falls: list[Fall] = []
        self.unclaimed: dict[str, float] = {}
        """By device, where its processes are listed."""
        self.idle_at: dict[str, float] = {}
        """By device: since when nothing ran on it."""
        self._used: dict[str, int] = {}
        self._returned: dict[str, int] = {}
        """By device: how much less is used than at the sample before."""

    def taking(self, snapshot: Snapshot) -> Steps[bool]:
        """Device by device. False if the snapshot is not newer than the last."""
        if not self.history.begin(snapshot):
            return False
        self.due, self.falls = [], []
        pools = _pools(report for report in snapshot.reports if report.uses_device)
        complete = complete_lists(snapshot.devices, snapshot.faults, snapshot.private_pid_namespace)
        present, seen = set(), set()
        yield
        for device in snapshot.devices:
            present.add(device.uuid)
            # What did not answer this time says nothing: not of its memory, and not of who ended.
            if not device.missed and device.used_bytes is not None:
                self._device(device, _borne_out(device, pools.get(device.uuid, {}), device.uuid in complete))
                seen.add(device.uuid)
                yield
        self._end(seen)
        yield
        for key in [key for key in self.watches if key[0] not in present]:
            self._leave(self.watches.pop(key))
        return True

    def _device(self, device: DeviceReading, reports: _Reports) -> None:
        history, uuid, now, size = self.history, device.uuid, self.history.now, device.size_bytes or 0
        used = device.used_bytes or 0
        self._returned[uuid] = self._used.get(uuid, used) - used
        self._used[uuid] = used
        all_live = sum(live for _, live, _ in reports.values()) if reports else nan
        all_held = sum(held for _, _, held in reports.values()) if reports else nan
        known = 0
        for process in device.processes or ():
            identity = (process.pid, process.start_ticks)
            known += self._life((uuid, *identity), process, reports.pop(identity, None) if reports else None, size)
        for identity, report in reports.items():
            known += self._life((uuid, *identity), None, report, size)
        watch = self.watches.get((uuid, None, None))
        if watch is None:
            watch = self.watches[uuid, None, None] = TrackedSeries((uuid, None, None), "", history.device(uuid))
        watch.seen = now
        unclaimed = float(max(0, used - known))
        if device.processes is None:
            self._heed_fall(watch, unclaimed, size)
            self.unclaimed.pop(uuid, None)
        else:
            self.unclaimed[uuid] = unclaimed
        watch.used = unclaimed
        busy = device.sensors.gpu_utilization_ratio
        if busy == 0:
            self.idle_at.setdefault(uuid, now)
        else:
            self.idle_at.pop(uuid, None)
        closed = watch.series.add((now, used, all_live, all_held, nan if busy is None else busy, unclaimed))
        if closed:
            self.due.append((watch, closed))

    def _life(self, life: Life, process: ProcessUsage | None, report: _Report | None, size: float) -> int:
        """Takes in one process on one device; returns how much of the device it is known to use."""
        own = process.used_bytes if process is not None else None
        if own is None and report is None:
            return 0
        watch = self.watches.get(life) or self._begin(life, process, report)
        if watch is None:
            return own or 0
        now = self.history.now
        watch.seen = now
        if report is None:
            used, held = float(own or 0), 0
            if life[2] is None:
                self._heed_fall(watch, used, size)
            watch.counted = False
            watch.used = used
            closed = watch.series.add((now, used, nan, nan))
        else:
            full, live, held = report
            if not watch.counted and watch.born < now:
                watch.begin_again(now)  # another signal is trusted from now on
            watch.counted = True
            watch.name = full.workload or watch.name
            watch.used = float(live)
            watch.peaks.add(full, life[0], now)
            closed = watch.series.add((now, nan if own is None else own, live, held))
        if closed:
            self.due.append((watch, closed))
        return own if own is not None else held

    def _begin(self, life: Life, process: ProcessUsage | None, report: _Report | None) -> TrackedSeries | None:
        series = self.history.life(life)
        if series is None:
            return None
        name = report[0].workload if report is not None else ""
        if process is not None:
            name = name or process.comm or ""
            if process.state not in ("gone", "zombie"):
                # What a newcomer took was given back by somebody before.
                self._returned[life[0]] += process.used_bytes or 0
        watch = self.watches[life] = TrackedSeries(life, name, series)
        return watch

    def _end(self, devices: set[str]) -> None:
        """Ends the lives on those devices that were not seen this time."""
        now = self.history.now
        gone = [
            watch
            for (uuid, pid, _), watch in self.watches.items()
            if watch.seen != now and pid is not None and uuid in devices
        ]
        for watch in gone:
            del self.watches[watch.life]
            size = _last(watch)
            self.falls.append(Fall(watch, size, True, True, self._returned[watch.uuid] >= RETURNED * size))
            self._leave(watch)

    def _leave(self, watch: TrackedSeries) -> None:
        uuid, pid, ticks = watch.life
        if pid is None:
            self.history.forget(uuid)
            self.unclaimed.pop(uuid, None)
            self.idle_at.pop(uuid, None)
            self._used.pop(uuid, None)
        else:
            self.history.end((uuid, pid, ticks))

    def _heed_fall(self, watch: TrackedSeries, used: float, size: float) -> None:
        before = watch.used
        if before != before or not size:
            return
        far = before - used > FALL * size and used < FALL_SHARE * before
        if far or used < EMPTY * size <= before:
            fall = before - used
            self.falls.append(
                Fall(watch, fall, False, used < EMPTY * size, self._returned[watch.uuid] >= RETURNED * fall)
            )
            watch.begin_again(self.history.now)


def _last(watch: TrackedSeries) -> float:
    """What the life held at last."""
    row = watch.series.rows.newest(1)
    known = [value for value in row[1:] if value == value]
    return max(known, default=0.0)


def _borne_out(device: DeviceReading, reports: _Reports, complete: bool) -> _Reports:
    if not complete or not reports:
        return reports
    counts = listed(device)
    return {identity: own for identity, own in reports.items() if borne_out(counts, identity, complete)}


def _pools(reports: Iterable[AgentReport]) -> dict[str, _Reports]:
    """Of each device, by process."""
    table: dict[str, _Reports] = {}
    for report in reports:
        identity = (report.pid, report.start_ticks)
        for pool in outermost(report.pools):
            own = table.setdefault(pool.device_uuid, {})
            before = own.get(identity)
            if before is None:
                own[identity] = (report, pool.live_bytes, pool.held_bytes)
            else:
                own[identity] = (report, before[1] + pool.live_bytes, before[2] + pool.held_bytes)
    return table
