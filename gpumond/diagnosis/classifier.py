"""From the course of devices and lives to verdicts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from math import inf, isfinite

from gpumond.diagnosis import detectors, messages
from gpumond.diagnosis.distributed import RankGroup
from gpumond.diagnosis.idle import idle_seconds
from gpumond.diagnosis.leak import OUTSIDE, Leak, LeakCase, find, follow, follow_stairs, of_stairs
from gpumond.diagnosis.leak_pattern import form
from gpumond.diagnosis.plateaus import REST_MINUTES
from gpumond.diagnosis.shapes import SHAPES, Shape, shape
from gpumond.diagnosis.tracked_series import Key, TrackedSeries
from gpumond.diagnosis.tracker import Fall, Tracker
from gpumond.history import UNCLAIMED, USED, History
from gpumond.history.series import MAX, MINUTE
from gpumond.model.cooperative import Steps
from gpumond.model.frame import Verdict, VerdictKind
from gpumond.model.snapshot import DeviceReading, ProcessUsage, Snapshot

RECENT_MINUTES = 15
LEAST_RELEASE = 0.02
"""An end that gave back less of its device is not worth a word."""
RELEASE_SECONDS = 60.0
CRASH_SECONDS = 900.0
"""For how long these are said."""
UNCLAIMED_RATIO = 0.02
"""A device has a course of its own if more than this share of it has no visible owner."""
RETRIED_SECONDS = 600.0
DOUBTS = 3
"""So many minutes in a row speak against a shape before it is said no more."""

Evidence = tuple[tuple[str, float], ...]


class Classifier:
    """Everything that is known of the past, and what is concluded from it."""

    def __init__(self, pace: float) -> None:
        self._course = Tracker(pace)
        self._devices: dict[str, DeviceReading] = {}
        self._parents: frozenset[str | None] = frozenset()
        self._events: list[tuple[float, Verdict]] = []
        """With the time until which each is said."""
        self._full_at: defaultdict[str, float] = defaultdict(lambda: -inf)
        self._xid_at: defaultdict[str, float] = defaultdict(lambda: -inf)
        self._xids: dict[tuple[str, int], int] = {}
        self._begun = False
        self._ramps: dict[str, tuple[float, float]] = {}
        """By device: when it was last seen on its way to be full, and the seconds that were left then."""
        self._crashes: dict[tuple[str, str], list[float]] = {}
        """By device and program, those of the last while."""
        self._loops: dict[tuple[str, str], tuple[float, Verdict]] = {}
        """Crash loops, with the time until which each is said."""
        self._flat: dict[Key, detectors.Flat] = {}
        self._ranks = RankGroup()

    @property
    def history(self) -> History:
        return self._course.history

    def taking(self, snapshot: Snapshot) -> Steps[bool]:
        """Takes the snapshot in. False if it is not newer than the last."""
        self._heed_ends(snapshot)
        if not (yield from self._course.taking(snapshot)):
            return False
        now = self.history.now
        before, self._devices = self._devices, {device.uuid: device for device in snapshot.devices}
        self._forget(before.keys() - self._devices.keys())
        self._parents = frozenset(device.parent_uuid for device in snapshot.devices)
        self._heed_xids(snapshot)
        for watch, closed in self._course.due:
            device = self._devices[watch.uuid]
            if closed > MINUTE and watch.uuid not in self._parents:
                self._judge_course(watch, device, closed)
            if watch.pid is None and device.size_bytes:
                left = detectors.ramp(watch.series, float(device.used_bytes or 0), device.size_bytes)
                if left is not None:
                    self._ramps[watch.uuid] = (now, left)
            yield
        for fall in self._course.falls:
            self._explain(fall, snapshot)
        for device in snapshot.devices:
            whole = self._course.watches.get((device.uuid, None, None))
            if whole is not None and whole.seen == now:
                self._judge_pressure(whole, device)
                self._judge_orphans(whole, device)
        self._events = [event for event in self._events if event[0] > now]
        self._loops = {key: loop for key, loop in self._loops.items() if loop[0] > now}
        return True

    def verdicts(self) -> tuple[Verdict, ...]:
        watches = self._course.watches.values()
        said = [verdict for watch in watches for verdict in watch.verdicts.values()]
        if any(watch.leak for watch in watches):
            instead = self._ranks.verdicts(watches)
            if instead:
                said = [verdict for watch in watches for verdict in _said(watch, instead)]
        return (*said, *(verdict for _, verdict in (*self._events, *self._loops.values())))

    def _judge_course(self, watch: TrackedSeries, device: DeviceReading, closed: int) -> None:
        """Shape, leak, fragmentation: all that changes by the minute."""
        size = device.size_bytes
        if watch.pid is None and not self._has_own_course(watch, device):
            watch.leak = None
            watch.verdicts = {kind: said for kind, said in watch.verdicts.items() if kind not in (*SHAPES, "leak")}
            return
        series, what = watch.series, watch.main
        medians = [value for value in series.column(MINUTE, what, count=REST_MINUTES) if value == value]
        highs = series.column(MINUTE, what, MAX, 1)
        if medians and size and highs[-1] == highs[-1]:
            watch.levels.add(series.times(MINUTE, 1)[-1], medians, highs[-1], size)
        watch.leak = self._leak(watch, device, closed)
        self._say_leak(watch, device)
        found = None if watch.leak else shape(series, what, watch.born, watch.levels, size)
        self._say_shape(watch, found)
        if watch.pid is not None:
            self._judge_split(watch, device)
            self._judge_idle(watch, device)
        elif device.processes is None:
            self._judge_idle(watch, device)

    def _has_own_course(self, watch: TrackedSeries, device: DeviceReading) -> bool:
        if device.processes is None or watch.leak is not None:
            return True
        unclaimed = watch.series.column(MINUTE, UNCLAIMED, count=1)[-1]
        return bool(device.size_bytes) and unclaimed >= UNCLAIMED_RATIO * (device.size_bytes or inf)

    def _leak(self, watch: TrackedSeries, device: DeviceReading, closed: int) -> Leak | None:
        room, leak = self._room(watch.uuid, device), watch.leak
        if leak is not None:
            if leak.pause:
                return follow_stairs(leak, watch.levels.steps, self.history.now)
            return follow(leak, watch.series, closed)
        for what in (watch.main, OUTSIDE) if watch.counted else (watch.main,):
            whole, size = self.history.device(watch.uuid), device.size_bytes
            leak = find(LeakCase(watch.series, whole, what, watch.born, size, room, self.history.pace), closed)
            if leak is not None:
                return leak
        stairs = watch.levels.stairs(device.size_bytes) if device.size_bytes else ()
        return of_stairs(stairs, watch.main) if stairs else None

    def _room(self, uuid: str, device: DeviceReading) -> float | None:
        """Bytes between the device's recent peak and its size."""
        if device.size_bytes is None or device.used_bytes is None:
            return None
        highs = self.history.device(uuid).column(MINUTE, USED, MAX, RECENT_MINUTES)
        peak = max((high for high in highs if high == high), default=0.0)
        return max(0.0, device.size_bytes - max(peak, float(device.used_bytes)))

    def _say_leak(self, watch: TrackedSeries, device: DeviceReading) -> None:
        leak, pace = watch.leak, self.history.pace
        if leak is None:
            watch.verdicts.pop("leak", None)
            return
        room = self._room(watch.uuid, device)
        per_second = leak.slope * pace
        left = None if room is None else room / per_second
        shaped = "stairs" if leak.pause else form(leak, watch.series, self.history.device(watch.uuid))
        who = messages.program(watch.name, watch.pid, _label(device))
        since = self._since(watch, "leak", leak.onset)
        evidence: list[tuple[str, float]] = [
            ("slope_bytes_per_second", per_second),
            ("growth_bytes", leak.growth),
            ("window_seconds", leak.window / pace),
            ("significance", leak.significance),
            ("processes", 1.0),
            ("devices", 1.0),
        ]
        if leak.what == OUTSIDE:
            evidence.append(("outside_pools", 1.0))
        summary = messages.leak(who, _label(device), 60 * per_second, since, left, shaped, leak.what == OUTSIDE)
        watch.verdicts["leak"] = Verdict(watch.uuid, watch.pid, "leak", since, tuple(evidence), left, summary, shaped)

    def _say_shape(self, watch: TrackedSeries, found: Shape | None) -> None:
        said = next((kind for kind in SHAPES if kind in watch.verdicts), None)
        watch.doubts = 0 if found is not None and found.kind == said else watch.doubts + 1
        sudden = found.kind == "step-change" if found is not None else watch.leak is not None or said == "warm-up"
        if said is not None and not sudden and 0 < watch.doubts < DOUBTS:
            return
        for kind in SHAPES:
            if found is None or found.kind != kind:
                watch.verdicts.pop(kind, None)
        if found is not None:
            who = messages.program(watch.name, watch.pid, _label(self._devices[watch.uuid]))
            since = self._since(watch, found.kind, found.at)
            evidence = tuple((k, v / self.history.pace if k == "period_seconds" else v) for k, v in found.evidence)
            self._say(watch, found.kind, since, evidence, messages.of_shape(found.kind, who, dict(evidence), since))

    def _judge_split(self, watch: TrackedSeries, device: DeviceReading) -> None:
        found = detectors.split(
            watch.peaks.minutes,
            device.size_bytes,
            self.history.now - watch.peaks.retried_at < RETRIED_SECONDS,
            "fragmentation" in watch.verdicts,
        )
        if found is None:
            watch.verdicts.pop("fragmentation", None)
            return
        evidence = (
            ("fragmentation_ratio", found.ratio),
            ("peak_live_bytes", found.live),
            ("peak_kept_bytes", found.kept),
            ("crept_bytes", found.crept),
        )
        who = messages.program(watch.name, watch.pid, "")
        summary = messages.fragmentation(who, _label(device), found.ratio, found.kept, found.live)
        self._say(watch, "fragmentation", self._since(watch, "fragmentation", found.since), evidence, summary)

    def _judge_idle(self, watch: TrackedSeries, device: DeviceReading) -> None:
        process = next((one for one in device.processes or () if one.pid == watch.pid), None)
        seconds = self._idle_seconds(watch, device, process)
        held = watch.series.column(MINUTE, USED if watch.pid else UNCLAIMED, count=1)[-1]
        held = held if isfinite(held) else watch.used
        if seconds < detectors.IDLE_SECONDS or not device.size_bytes or held < detectors.IDLE_RATIO * device.size_bytes:
            watch.verdicts.pop("idle-holder", None)
            return
        seconds /= self.history.pace
        who = messages.program(watch.name, watch.pid, _label(device))
        evidence = (("idle_seconds", seconds), ("held_bytes", held))
        since = self._since(watch, "idle-holder", self.history.now - seconds * self.history.pace)
        self._say(watch, "idle-holder", since, evidence, messages.idle(who, _label(device), held, seconds))

    def _idle_seconds(self, watch: TrackedSeries, device: DeviceReading, process: ProcessUsage | None) -> float:
        """As the reading says, else by the device's utilisation. Of this clock; 0 if unknown."""
        said = idle_seconds(device, process) if process is not None else device.idle_seconds
        if said is not None:
            return said * self.history.pace
        since = self._course.idle_at.get(watch.uuid, inf)
        return max(0.0, self.history.now - max(since, watch.born))

    def _judge_pressure(self, watch: TrackedSeries, device: DeviceReading) -> None:
        size, used = device.size_bytes, device.used_bytes
        if not size or used is None:
            return
        ratio, (ramp_at, left) = used / size, self._ramps.get(device.uuid, (-inf, 0.0))
        ramps = self.history.now - ramp_at < detectors.RAMP_HELD_SECONDS
        if ratio >= detectors.NEARLY_FULL:
            self._full_at[device.uuid] = self.history.now
        full = ratio > (detectors.FULL_CLEAR if "pressure" in watch.verdicts else detectors.FULL)
        if not full and not ramps:
            watch.verdicts.pop("pressure", None)
            return
        soon = left / self.history.pace if ramps else None
        evidence = (("used_ratio", ratio), ("free_bytes", float(size - used)))
        since = self._since(watch, "pressure", self.history.now)
        self._say(watch, "pressure", since, evidence, messages.pressure(_label(device), ratio, soon), soon)

    def _judge_orphans(self, watch: TrackedSeries, device: DeviceReading) -> None:
        if device.processes is None:
            return
        unclaimed = self._course.unclaimed.get(device.uuid, 0.0)
        if unclaimed >= detectors.ORPHAN_BYTES or "orphan" in watch.verdicts:
            self._judge_orphan(watch, device, unclaimed, None)
        else:
            self._flat.pop(watch.life, None)
        for process in device.processes:
            if process.state in ("gone", "zombie") and process.used_bytes is not None:
                own = self._course.watches.get((device.uuid, process.pid, process.start_ticks))
                if own is not None:
                    self._judge_orphan(own, device, float(process.used_bytes), process)

    def _judge_orphan(
        self, watch: TrackedSeries, device: DeviceReading, size: float, process: ProcessUsage | None
    ) -> None:
        now, busy = self.history.now, device.sensors.gpu_utilization_ratio
        stretch = self._flat[watch.life] = detectors.flat(self._flat.get(watch.life), size, now)
        idle = max(0.0, now - self._course.idle_at.get(device.uuid, inf))
        if not detectors.orphaned(stretch, now, busy, idle, device.size_bytes):
            watch.verdicts.pop("orphan", None)
            return
        seconds = (now - stretch.since) / self.history.pace
        holders = [one for one in device.processes or () if "holder" in one.kinds]
        holder = messages.program(holders[0].comm or "", holders[0].pid, "") if len(holders) == 1 else ""
        who = "" if process is None else messages.program(process.comm or watch.name, process.pid, "")
        evidence = (("unclaimed_bytes" if process is None else "held_bytes", size), ("unchanged_seconds", seconds))
        since = self._since(watch, "orphan", stretch.since)
        self._say(watch, "orphan", since, evidence, messages.orphan(_label(device), size, seconds, who, holder))

    def _explain(self, fall: Fall, snapshot: Snapshot) -> None:
        watch, now = fall.watch, self.history.now
        self._flat.pop(watch.life, None)
        device = self._devices[watch.uuid]
        size = device.size_bytes or 0
        if not fall.given_back or fall.size_bytes < LEAST_RELEASE * size:
            return
        label = _label(device)
        who = messages.program(watch.name, watch.pid, label)
        nearly_full_at, xid_at = self._full_at[watch.uuid], self._xid_at[watch.uuid]
        why = detectors.cause(watch.ending, watch.peaks.failed_at, now, nearly_full_at, xid_at)
        evidence = (("released_bytes", fall.size_bytes),)
        if why:
            summary = messages.crash(who, label, fall.size_bytes, why, certain=why == detectors.UNHANDLED)
            self._event(watch, "crash", CRASH_SECONDS, evidence, summary)
            self._loop(watch, device)
        elif fall.ended or fall.emptied:
            ended = fall.ended and not _exists(watch, snapshot)
            summary = messages.release(who if watch.pid else "", label, fall.size_bytes, ended)
            self._event(watch, "release", RELEASE_SECONDS, evidence, summary)

    def _loop(self, watch: TrackedSeries, device: DeviceReading) -> None:
        now, key = self.history.now, (watch.uuid, watch.name)
        self._crashes[key] = [*self._crashes.get(key, ()), now]
        lately = ((key, [at for at in own if now - at < detectors.LOOP_SECONDS]) for key, own in self._crashes.items())
        self._crashes = {key: own for key, own in lately if own}
        times = self._crashes[key]
        if len(times) >= detectors.LOOP:
            who, until = watch.name or "a program", times[-detectors.LOOP] + detectors.LOOP_SECONDS
            summary = messages.crash_loop(who, _label(device), len(times))
            evidence, since = (("crashes", len(times)),), self.history.unix(times[0])
            self._loops[key] = until, Verdict(watch.uuid, None, "crash-loop", since, evidence, None, summary)

    def _event(self, watch: TrackedSeries, kind: VerdictKind, seconds: float, evidence: Evidence, summary: str) -> None:
        now = self.history.now
        verdict = Verdict(watch.uuid, watch.pid, kind, self.history.unix(now), evidence, None, summary)
        self._events.append((now + seconds, verdict))

    def _forget(self, gone: Set[str]) -> None:
        """Devices that are no longer there."""
        for uuid in gone:
            for table in (self._full_at, self._xid_at, self._ramps):
                table.pop(uuid, None)
        if gone:
            self._xids = {key: count for key, count in self._xids.items() if key[0] not in gone}
            self._flat = {key: stretch for key, stretch in self._flat.items() if key[0] not in gone}

    def _heed_ends(self, snapshot: Snapshot) -> None:
        """Keeps how a program ended until its memory is free: that takes a moment longer."""
        endings = {(end.pid, end.start_ticks): end.ending for end in snapshot.ends}
        if endings:
            for (_, pid, ticks), watch in self._course.watches.items():
                if pid is not None and ticks is not None:
                    watch.ending = endings.get((pid, ticks), watch.ending)

    def _heed_xids(self, snapshot: Snapshot) -> None:
        for seen in snapshot.xids:
            key = (seen.device_uuid, seen.xid)
            # What was counted before the first snapshot is no news.
            if seen.count > self._xids.get(key, 0) and self._begun:
                self._xid_at[seen.device_uuid] = self.history.now
            self._xids[key] = seen.count
        self._begun = True

    def _since(self, watch: TrackedSeries, kind: str, at: float) -> float:
        """The onset in unix time: a step of the wall clock does not move what has been said."""
        said = watch.verdicts.get(kind)
        return self.history.unix(at) if said is None else said.since

    def _say(
        self,
        watch: TrackedSeries,
        kind: VerdictKind,
        since: float,
        evidence: Evidence,
        summary: str,
        left: float | None = None,
    ) -> None:
        watch.verdicts[kind] = Verdict(watch.uuid, watch.pid, kind, since, evidence, left, summary)


def _exists(watch: TrackedSeries, snapshot: Snapshot) -> bool:
    """The process has a connected agent, or the driver lists it on any device."""
    listed = {process.pid for device in snapshot.devices for process in device.processes or ()}
    return watch.pid in listed or any(report.pid == watch.pid for report in snapshot.reports)


def _said(watch: TrackedSeries, instead: Mapping[Key, Verdict | None]) -> Iterator[Verdict]:
    """The watch's verdicts, its leak replaced by what is said for all."""
    for verdict in watch.verdicts.values():
        shown = instead.get(watch.life, verdict) if verdict.kind == "leak" else verdict
        if shown is not None:
            yield shown


def _label(device: DeviceReading) -> str:
    return f"GPU {device.index}"
