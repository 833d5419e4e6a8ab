"""Verdicts on the memory curves of devices and processes, from one snapshot after another. No I/O.

Covers the development of memory over time. Every device and process has at most one *pattern* (warm-up, steady, churn,
periodic, step-change, filling) and the problems that apply (leak, fragmentation, pressure, orphan, idle-holder, crash,
crash-loop). A leak, and ``growing``, which suspects one, replace the pattern.

Does not cover levels and counters as such (rules) and the owners of memory (the ledger).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import replace
from math import inf, isfinite

from gpumond.diagnosis import detectors, sentences
from gpumond.diagnosis.detectors import idle_seconds
from gpumond.diagnosis.history_recorder import Evidence, Fall, HistoryRecorder, TrackedSeries
from gpumond.diagnosis.leak import (
    MODEL_LOAD_SECONDS,
    allocation_growth,
    find_leak,
    fit_leak_line,
    held_growth,
    judge_growth,
    slowing_growth,
    updated_leak,
)
from gpumond.diagnosis.leak_criteria import OUTSIDE_POOLS, Leak, form_of as form_of
from gpumond.diagnosis.patterns import REST_MINUTES, UsePattern, has_left_level, pattern_of
from gpumond.diagnosis.previous_runs import HELD_MINUTES, EarlierUses
from gpumond.facts.frame import Verdict
from gpumond.facts.program import IDLE_SECONDS
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Snapshot
from gpumond.facts.verdicts import PATTERN_NAMES, VerdictName
from gpumond.tick.history import (
    FIVE_MINUTES,
    HELD,
    LIVE,
    MAX,
    MAX_REPORT_AGE_SECONDS,
    MINUTE,
    QUARTER_HOUR,
    STEP_END,
    STRANDED,
    UNATTRIBUTED,
    USED,
    History,
    SeriesKey,
)

RECENT_MINUTES = 15
NOTABLE_PEAK_RATIO = 0.02
"""Part of a device by which its recent peak exceeds its use, so the time until it is full needs an explanation."""
MIN_RELEASE_RATIO = 0.02
"""Share of its device that a process must have held for a verdict memory-freed."""
MEMORY_FREED_VERDICT_SECONDS = 60.0
CRASH_VERDICT_SECONDS = 900.0
"""Seconds for which a verdict memory-freed, and one on a crash, remain active."""
UNATTRIBUTED_RATIO = 0.02
"""A device is classified as well if more than this share of its memory has no visible owner."""
FREED_BLOCKS = 4
"""Number of blocks of 15 s for which a pool is small before its fragmentation ends."""
MAX_DISAGREEMENTS = 3
"""Consecutive minutes with another pattern after which a pattern's verdict ends."""

MIN_GROUP_DEVICES = 4
MIN_GROUP_RATIO = 0.6
GROUP_ONSET_SECONDS = 1800.0
"""Maximum distance of the onsets of leaks that count as one group."""
DEAD_STATES = ("gone", "zombie")
"""States of processes that have ended."""


class Diagnosis:
    """State of all tracked series and events, and the active verdicts.

    ``speedup``: seconds of this clock for one second of the snapshots; slopes and times in verdicts are in real
    seconds.
    """

    def __init__(self, speedup: float = 1.0) -> None:
        self.verdicts: tuple[Verdict, ...] = ()
        self._recorder = HistoryRecorder(speedup)
        self._devices: Mapping[str, DeviceReading] = {}
        self._parents: frozenset[str | None] = frozenset()
        self._events: list[tuple[float, Verdict]] = []
        """Verdicts on ends, each with the time until which it is active."""
        self._unexplained_falls: list[tuple[float, Fall]] = []
        """Falls of running programs, with their times, until their agents have reported why: an allocation failed."""
        self._xid_at: defaultdict[str, float] = defaultdict(lambda: -inf)
        self._xids: dict[tuple[str, int], int] = {}
        self._has_snapshot = False
        self._ramps: dict[str, tuple[float, float]] = {}
        """By device: time of the last ramp towards full, and the seconds that were left then."""
        self._crashes: dict[tuple[str, str, int | None], list[float]] = {}
        """By device and program: times of recent crashes."""
        self._loops: dict[tuple[str, str, int | None], tuple[float, Verdict]] = {}
        """Crash loops, with the time until which each is active."""
        self._flat_periods: dict[SeriesKey, detectors.FlatPeriod] = {}
        self._leak_groups = LeakGroups()
        self.earlier_uses = EarlierUses()
        """What programs did before; the store keeps it."""

    @property
    def history(self) -> History:
        return self._recorder.history

    def add(self, snapshot: Snapshot) -> bool:
        """Add a snapshot. Return False if it is not newer than the last one."""
        self._record_endings(snapshot)
        if not self._recorder.record(snapshot):
            return False
        now = self.history.now
        before, self._devices = self._devices, snapshot.devices_by_uuid
        self._forget(before.keys() - self._devices.keys())
        self._parents = frozenset(device.parent_uuid for device in snapshot.devices)
        self._record_xids(snapshot)
        for tracked, closed_tiers in self._recorder.due:
            device = self._devices[tracked.uuid]
            if closed_tiers > FIVE_MINUTES:
                tracked.quartiles.add(tracked.series, tracked.main_signal)
            if tracked.uuid not in self._parents:
                if closed_tiers > MINUTE:
                    self._classify_curve(tracked, device, closed_tiers)
                self._classify_growth(tracked, device)
                active = tracked.verdicts.get("fragmentation")
                if active and self._was_freed(tracked, dict(active.evidence)["peak_kept_bytes"]):
                    tracked.peaks.restart()
                    del tracked.verdicts["fragmentation"]
            if tracked.pid is None and device.usable_bytes:
                seconds_left = detectors.seconds_until_full(
                    tracked.series, float(device.used_bytes or 0), device.usable_bytes
                )
                if seconds_left is not None and self._is_beyond_start(tracked.uuid, device):
                    self._ramps[tracked.uuid] = (now, seconds_left)
                else:
                    self._ramps.pop(tracked.uuid, None)
        for fall in self._recorder.falls:
            if fall.ended:
                levels = fall.tracked.sawtooth
                self.earlier_uses.record(
                    fall.tracked.program, snapshot.taken_at, levels.sustained_bytes, levels.long_tooth_bytes
                )
            if fall.tracked.has_agent_pools and not fall.ended:
                self._unexplained_falls.append((now, fall))
            else:
                self._explain_fall(fall, snapshot, now)
        while (
            self._unexplained_falls
            and now - self._unexplained_falls[0][0] >= MAX_REPORT_AGE_SECONDS * self.history.speedup
        ):
            at, fall = self._unexplained_falls.pop(0)
            if self._recorder.tracked_series.get(fall.tracked.key) is fall.tracked:
                self._explain_fall(fall, snapshot, at)
        for device in snapshot.devices:
            device_series = self._recorder.tracked_series.get((device.uuid, None))
            if device_series is not None and device_series.sampled_at == now:
                self._check_device(device_series, device)
                self._check_orphans(device_series, device, snapshot)
        for tracked in self._recorder.tracked_series.values() if snapshot.unresponsive else ():
            if tracked.process in snapshot.unresponsive:
                tracked.verdicts.clear()
        self._events = [event for event in self._events if event[0] > now]
        self._loops = {key: loop for key, loop in self._loops.items() if loop[0] > now}
        return True

    def active_verdicts(self) -> tuple[Verdict, ...]:
        tracked_series = self._recorder.tracked_series.values()
        active = [verdict for tracked in tracked_series for verdict in tracked.verdicts.values()]
        if any(tracked.leak for tracked in tracked_series):
            replacements = self._leak_groups.replacements(tracked_series)
            if replacements:
                active = [verdict for tracked in tracked_series for verdict in _current_verdicts(tracked, replacements)]
        return (*active, *(verdict for _, verdict in (*self._events, *self._loops.values())))

    def _classify_curve(self, tracked: TrackedSeries, device: DeviceReading, closed_tiers: int) -> None:
        """Judge pattern, leak and fragmentation: the verdicts that can change once a minute."""
        size = device.size_bytes
        if tracked.pid is None and not self._is_device_classified(tracked, device):
            tracked.leak = None
            tracked.verdicts = {
                kind: active for kind, active in tracked.verdicts.items() if kind not in (*PATTERN_NAMES, "leak")
            }
            return
        series, signal = tracked.series, tracked.main_signal
        medians = [value for value in series.column(MINUTE, signal, count=REST_MINUTES) if value == value]
        highs = series.column(MINUTE, signal, MAX, 1)
        if medians and size and highs[-1] == highs[-1]:
            tracked.plateaus.add(series.times(MINUTE, 1)[-1], medians, highs[-1], size)
        (at,) = series.times(MINUTE, 1)
        if medians and at >= tracked.started + MODEL_LOAD_SECONDS:
            tracked.sawtooth.add(at, series.column(MINUTE, signal, count=HELD_MINUTES), bool(tracked.leak))
        if closed_tiers > QUARTER_HOUR:
            tracked.floors.add(self.history.now, series.column(QUARTER_HOUR, signal, count=1)[-1])
        tracked.leak = self._current_leak(tracked, device, closed_tiers)
        self._set_leak(tracked, device)
        pattern = (
            None
            if tracked.leak or tracked.growth
            else pattern_of(series, signal, tracked.started, tracked.plateaus, size)
        )
        if pattern is None or pattern.kind == "warm-up":
            pattern = self._filling_pattern(tracked, device, closed_tiers) or pattern
        has_left = "steady" in tracked.verdicts and has_left_level(
            dict(tracked.verdicts["steady"].evidence)["level_bytes"], medians, size
        )
        if pattern is not None and pattern.kind == "steady" and signal == STEP_END:
            level, live = dict(pattern.evidence)["level_bytes"], series.column(MINUTE, LIVE, MAX, 1)
            if live[-1] < level and has_left_level(level, live, size):  # freed since the last step
                pattern, has_left = None, True
        self._set_pattern(tracked, pattern, has_left)
        if tracked.pid is not None:
            self._check_fragmentation(tracked, device)
            self._check_idle(tracked, device)
        elif device.processes is None:
            self._check_idle(tracked, device)

    def _filling_pattern(self, tracked: TrackedSeries, device: DeviceReading, closed_tiers: int) -> UsePattern | None:
        """Return growth that slows down. It is judged every five minutes, and else as before."""
        if tracked.leak or tracked.growth:
            return None
        if closed_tiers <= FIVE_MINUTES:
            return tracked.filling
        tracked.filling, slowing, room_bytes = (
            None,
            slowing_growth(tracked, self.history),
            self._room_bytes(tracked.uuid, device),
        )
        if slowing is not None:
            speedup = self.history.speedup
            evidence = [
                ("slope_bytes_per_second", slowing.rate * speedup),
                ("growth_bytes", slowing.growth.growth_bytes),
                ("exponent", slowing.curve.exponent),
            ]
            if room_bytes is not None:
                evidence.append(
                    ("full_seconds", slowing.curve.seconds_left(room_bytes, slowing.curve.exponent) / speedup)
                )
            tracked.filling = UsePattern("filling", slowing.growth.begin, tuple(evidence))
        return tracked.filling

    def _classify_growth(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        """Judge growth of minutes, every 15 s."""
        is_classified = tracked.pid is not None or self._is_device_classified(tracked, device)
        room_bytes = self._room_bytes(tracked.uuid, device) if tracked.growth else None
        if judge_growth(
            tracked,
            self.history,
            _label(device),
            room_bytes,
            is_classified,
            self.earlier_uses.repeated_bytes(tracked.program),
        ):
            self._set_leak(tracked, device)
            self._set_pattern(tracked, None)

    def _is_beyond_start(self, uuid: str, device: DeviceReading) -> bool:
        """Return whether no process that is starting fills the device, and it is fuller than what it returned from."""
        now, used = self.history.now, float(device.used_bytes or 0)
        if used > detectors.FULL_RATIO * (device.size_bytes or inf):
            return True
        processes = [one for one in self._recorder.tracked_series.values() if one.uuid == uuid and one.pid is not None]
        largest = max(processes, key=lambda one: one.used, default=None)
        if largest is not None and largest.used <= largest.sawtooth.any_repeated_bytes:
            return False
        young_bytes = sum(one.used for one in processes if now - one.started < detectors.RAMP_STARTUP_SECONDS)
        highs = self.history.device_series(uuid).column(0, USED, MAX, detectors.RAMP_BLOCKS)
        return young_bytes < detectors.RAMP_MAX_STEP_RATIO * (highs[-1] - highs[0]) if processes else True

    def _is_device_classified(self, tracked: TrackedSeries, device: DeviceReading) -> bool:
        if device.processes is None or tracked.leak is not None:
            return True
        unattributed = tracked.series.column(MINUTE, UNATTRIBUTED, count=1)
        return bool(unattributed) and unattributed[-1] >= UNATTRIBUTED_RATIO * (device.size_bytes or inf)

    def _current_leak(self, tracked: TrackedSeries, device: DeviceReading, closed_tiers: int) -> Leak | None:
        if tracked.leak is not None:
            return updated_leak(tracked, tracked.leak, self.history.now, closed_tiers)
        earlier_bytes = self.earlier_uses.repeated_bytes(tracked.program) if tracked.pid is not None else 0.0
        return find_leak(
            tracked,
            self.history,
            device.size_bytes,
            self._room_bytes(tracked.uuid, device),
            closed_tiers,
            earlier_bytes,
        )

    def _room_bytes(self, uuid: str, device: DeviceReading) -> float | None:
        """Return the bytes between the device's recent peak and what programs can use."""
        if device.usable_bytes is None or device.used_bytes is None:
            return None
        highs = self.history.device_series(uuid).column(MINUTE, USED, MAX, RECENT_MINUTES)
        peak = max((high for high in highs if high == high), default=0.0)
        return max(0.0, device.usable_bytes - max(peak, float(device.used_bytes)))

    def _set_leak(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        leak, history, speedup = tracked.leak, self.history, self.history.speedup
        if leak is None:
            tracked.verdicts.pop("leak", None)
            return
        room_bytes = self._room_bytes(tracked.uuid, device)
        allocations = allocation_growth(tracked, leak.signal, speedup)
        line = fit_leak_line(leak, tracked, history, room_bytes, allocations)
        per_second, window_seconds = leak.slope * speedup, leak.window_seconds / speedup
        if line is not None and line.full_at is not None:
            per_second, window_seconds = line.slope_bytes_per_second, line.at - line.points[0][0]
            seconds_left: float | None = line.full_at - history.to_unix(history.now)
        else:
            seconds_left = None if room_bytes is None else room_bytes / per_second
        form = "stairs" if leak.pause_seconds else form_of(leak, tracked.series, history.device_series(tracked.uuid))
        who = sentences.program_text(tracked.name, tracked.pid, _label(device))
        since = self._onset_time(tracked, "leak", leak.onset)
        evidence: list[tuple[str, float]] = [
            ("slope_bytes_per_second", per_second),
            ("growth_bytes", leak.growth_bytes),
            ("window_seconds", window_seconds),
            ("significance", leak.significance),
            ("processes", 1.0),
            ("devices", 1.0),
        ]
        if leak.signal == OUTSIDE_POOLS:
            evidence.append(("outside_pools", 1.0))
        if room_bytes is not None:
            evidence.append(("device_peak_bytes", (device.usable_bytes or 0) - room_bytes))
        evidence += held_growth(tracked, leak.signal, leak.tier, leak.onset)
        evidence += allocations.evidence if allocations else []
        size, used = float(device.usable_bytes or 0), float(device.used_bytes or 0)
        peak = size - (room_bytes or 0.0)
        seconds_left_now = (
            None
            if seconds_left is None or peak - used < NOTABLE_PEAK_RATIO * size
            else seconds_left + (peak - used) / per_second
        )
        summary = sentences.leak(
            who,
            _label(device),
            60 * per_second,
            since,
            history.to_unix(history.now),
            seconds_left,
            form,
            leak.signal == OUTSIDE_POOLS,
            allocations,
            peak,
            seconds_left_now,
        )
        tracked.verdicts["leak"] = tracked.verdict("leak", since, tuple(evidence), summary, seconds_left, form, line)

    def _set_pattern(self, tracked: TrackedSeries, pattern: UsePattern | None, has_left: bool = False) -> None:
        """Set the pattern's verdict. ``has_left``: the curve has left the active one, which ends at once."""
        active = next((kind for kind in PATTERN_NAMES if kind in tracked.verdicts), None)
        tracked.disagreements = 0 if pattern is not None and pattern.kind == active else tracked.disagreements + 1
        sudden = active == "warm-up" or (
            pattern.kind == "step-change" if pattern is not None else tracked.leak is not None
        )
        if active is not None and not sudden and not has_left and 0 < tracked.disagreements < MAX_DISAGREEMENTS:
            return
        for kind in PATTERN_NAMES:
            if pattern is None or pattern.kind != kind:
                tracked.verdicts.pop(kind, None)
        if pattern is not None:
            label = _label(self._devices[tracked.uuid])
            who = sentences.program_text(tracked.name, tracked.pid, label)
            since = self._onset_time(tracked, pattern.kind, pattern.at)
            evidence = tuple((k, v / self.history.speedup if k == "period_seconds" else v) for k, v in pattern.evidence)
            now = self.history.to_unix(self.history.now)
            tracked.verdicts[pattern.kind] = tracked.verdict(
                pattern.kind,
                since,
                evidence,
                sentences.pattern(
                    pattern.kind, who, label, dict(evidence), since, now, tracked.main_signal == STEP_END
                ),
            )

    def _check_fragmentation(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        fragmentation = tracked.peaks.fragmentation(
            device.size_bytes, self.history.now, "fragmentation" in tracked.verdicts
        )
        if fragmentation is not None and self._was_freed(tracked, fragmentation.unreclaimable_bytes):
            tracked.peaks.restart()
            fragmentation = None
        if fragmentation is None:
            tracked.verdicts.pop("fragmentation", None)
            return
        evidence = (
            ("fragmentation_ratio", fragmentation.ratio),
            ("peak_live_bytes", fragmentation.live_bytes),
            ("peak_kept_bytes", fragmentation.unreclaimable_bytes),
            ("kept_growth_bytes", fragmentation.growth_bytes),
        )
        who = sentences.program_text(tracked.name, tracked.pid, "")
        summary = sentences.fragmentation(
            who, _label(device), fragmentation.unreclaimable_bytes, fragmentation.live_bytes
        )
        tracked.verdicts["fragmentation"] = tracked.verdict(
            "fragmentation", self._onset_time(tracked, "fragmentation", fragmentation.since), evidence, summary
        )

    def _was_freed(self, tracked: TrackedSeries, peak_bytes: float) -> bool:
        """Return True if the pools keep nothing, or for a minute much less than at their peak: it was freed."""
        live, stranded = (tracked.series.column(0, signal, MAX, FREED_BLOCKS) for signal in (LIVE, STRANDED))
        sums = [one + other for one, other in zip(live, stranded, strict=True)]
        is_small = len(sums) == FREED_BLOCKS and max(sums) < detectors.FREED_RATIO * peak_bytes
        return is_small or sums[-1:] == [0.0]

    def _check_idle(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        process = device.processes_by_key.get(tracked.process) if tracked.process else None
        seconds = self._idle_seconds(tracked, device, process)
        newest = (
            tracked.series.column(MINUTE, signal, count=1)[-1]
            for signal in ((USED, HELD) if tracked.pid else (UNATTRIBUTED,))
        )
        held = next((value for value in newest if isfinite(value)), tracked.used)
        if seconds < IDLE_SECONDS or not device.size_bytes or held < detectors.IDLE_RATIO * device.size_bytes:
            tracked.verdicts.pop("idle-holder", None)
            return
        seconds /= self.history.speedup
        who = sentences.program_text(tracked.name, tracked.pid, _label(device))
        evidence = (("idle_seconds", seconds), ("held_bytes", held))
        since = self._onset_time(tracked, "idle-holder", self.history.now - seconds * self.history.speedup)
        tracked.verdicts["idle-holder"] = tracked.verdict(
            "idle-holder", since, evidence, sentences.idle(who, _label(device), held, seconds)
        )

    def _idle_seconds(self, tracked: TrackedSeries, device: DeviceReading, process: ProcessUsage | None) -> float:
        """Return the idle time from the reading, else from the utilization, in seconds of this clock; 0 if unknown."""
        reported = idle_seconds(device, process) if process is not None else device.idle_seconds
        if reported is not None:
            return reported * self.history.speedup
        since = self._recorder.idle_since.get(tracked.uuid, inf)
        return max(0.0, self.history.now - max(since, tracked.started))

    def _check_device(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        size, usable, used, now = device.size_bytes, device.usable_bytes, device.used_bytes, self.history.now
        if not size or usable is None or used is None:
            return
        ramp_at, ramp_seconds = self._ramps.get(device.uuid, (-inf, 0.0))
        seconds_left = ramp_seconds / self.history.speedup if now - ramp_at < detectors.RAMP_HELD_SECONDS else None
        for kind, detect in detectors.DEVICE_DETECTORS.items():
            detection = detect(
                detectors.DeviceState(
                    device, _label(device), used, size, usable, seconds_left, kind in tracked.verdicts
                )
            )
            if detection is None:
                tracked.verdicts.pop(kind, None)
            else:
                tracked.verdicts[kind] = tracked.verdict(kind, self._onset_time(tracked, kind, now), *detection)

    def _check_orphans(self, tracked: TrackedSeries, device: DeviceReading, snapshot: Snapshot) -> None:
        if device.processes is None or not _lists_all(device, snapshot):
            tracked.verdicts.pop("orphan", None)
            return
        unattributed = self._recorder.unattributed.get(device.uuid, 0.0)
        if unattributed >= detectors.ORPHAN_MIN_BYTES or "orphan" in tracked.verdicts:
            self._check_orphan(tracked, device, unattributed, None)
        else:
            self._flat_periods.pop(tracked.key, None)
        for process in device.processes:
            if process.state in DEAD_STATES and process.used_bytes is not None:
                ended = self._recorder.tracked_series.get((device.uuid, process.key))
                if ended is not None:
                    self._check_orphan(ended, device, float(process.used_bytes), process)

    def _check_orphan(
        self, tracked: TrackedSeries, device: DeviceReading, size: float, process: ProcessUsage | None
    ) -> None:
        now, utilization = self.history.now, device.sensors.gpu_utilization_ratio
        flat_period = self._flat_periods[tracked.key] = detectors.flat_period(
            self._flat_periods.get(tracked.key), size, now
        )
        idle = max(0.0, now - self._recorder.idle_since.get(device.uuid, inf))
        if not detectors.is_orphaned(flat_period, now, utilization, idle, device.size_bytes):
            tracked.verdicts.pop("orphan", None)
            return
        seconds = (now - flat_period.since) / self.history.speedup
        holders = [one for one in device.processes or () if "holder" in one.kinds]
        holder = sentences.program_text(holders[0].comm or "", holders[0].pid, "") if len(holders) == 1 else ""
        who = "" if process is None else sentences.program_text(process.comm or tracked.name, process.pid, "")
        programs = sum("holder" not in one.kinds and one.state not in DEAD_STATES for one in device.processes or ())
        evidence = (("unattributed_bytes" if process is None else "held_bytes", size), ("unchanged_seconds", seconds))
        since = self._onset_time(tracked, "orphan", flat_period.since)
        tracked.verdicts["orphan"] = tracked.verdict(
            "orphan", since, evidence, sentences.orphan(_label(device), size, seconds, who, holder, programs)
        )

    def _explain_fall(self, fall: Fall, snapshot: Snapshot, at: float) -> None:
        tracked, now = fall.tracked, self.history.now
        self._flat_periods.pop(tracked.key, None)
        device = self._devices[tracked.uuid]
        size = device.size_bytes or 0
        if not fall.given_back or fall.size_bytes < MIN_RELEASE_RATIO * size:
            return
        label = _label(device)
        who = sentences.program_text(tracked.name, tracked.pid, label)
        has_filled_device = fall.device_used_bytes >= detectors.FULL_AT_END_RATIO * (
            device.usable_bytes or inf
        ) and tracked.rises.are_recent(now, tracked.started)
        cause = detectors.crash_cause(
            tracked.ending, tracked.peaks.failed_at, now, has_filled_device, self._xid_at[tracked.uuid]
        )
        evidence = (("released_bytes", fall.size_bytes),)
        if cause and (fall.ended or tracked.process is None or tracked.process.start_ticks is None):
            summary = sentences.crash(
                who, label, fall.size_bytes, cause, is_certain=cause == detectors.UNHANDLED_OOM_CAUSE
            )
            self._add_event_verdict(tracked, "crash", CRASH_VERDICT_SECONDS, evidence, summary, at)
            self._detect_crash_loop(tracked, device)
        elif fall.emptied and (not fall.ended or (tracked.process and snapshot.may_contain(tracked.process))):
            failed = now - tracked.peaks.failed_at <= detectors.CRASH_SECONDS
            summary = sentences.release(who if tracked.pid else "", label, fall.size_bytes, failed)
            self._add_event_verdict(tracked, "memory-freed", MEMORY_FREED_VERDICT_SECONDS, evidence, summary, at)

    def _detect_crash_loop(self, tracked: TrackedSeries, device: DeviceReading) -> None:
        now, key = self.history.now, (tracked.uuid, *tracked.program)
        self._crashes[key] = [*self._crashes.get(key, ()), now]
        kept = (
            (key, [at for at in times if now - at < detectors.LOOP_SECONDS]) for key, times in self._crashes.items()
        )
        self._crashes = {key: times for key, times in kept if times}
        times = self._crashes[key]
        if len(times) >= detectors.LOOP_CRASHES:
            who, until = tracked.name or "a program", times[-detectors.LOOP_CRASHES] + detectors.LOOP_SECONDS
            summary = sentences.crash_loop(who, _label(device), len(times))
            verdict = Verdict(
                device_uuid=tracked.uuid,
                pid=None,
                start_ticks=None,
                kind="crash-loop",
                since=self.history.to_unix(times[0]),
                evidence=(("crashes", len(times)),),
                summary=summary,
            )
            self._loops[key] = until, verdict

    def _add_event_verdict(
        self, tracked: TrackedSeries, kind: VerdictName, seconds: float, evidence: Evidence, summary: str, at: float
    ) -> None:
        verdict = tracked.verdict(kind, self.history.to_unix(at), evidence, summary)
        self._events.append((self.history.now + seconds, verdict))

    def _forget(self, gone: Set[str]) -> None:
        """Remove the state of devices that are no longer listed."""
        for uuid in gone:
            for table in (self._xid_at, self._ramps):
                table.pop(uuid, None)
        if gone:
            self._xids = {key: count for key, count in self._xids.items() if key[0] not in gone}
            self._flat_periods = {
                key: flat_period for key, flat_period in self._flat_periods.items() if key[0] not in gone
            }

    def _record_endings(self, snapshot: Snapshot) -> None:
        """Record how a program ended until its memory is free, which takes a moment longer."""
        endings = {end.key: end.ending for end in snapshot.ends}
        if endings:
            for (_, process), tracked in self._recorder.tracked_series.items():
                if process is not None:
                    tracked.ending = endings.get(process, tracked.ending)

    def _record_xids(self, snapshot: Snapshot) -> None:
        for error in snapshot.xids:
            key = (error.device_uuid, error.xid)
            # Errors from before the first snapshot are not new.
            if error.count > self._xids.get(key, 0) and self._has_snapshot and error.xid in detectors.FATAL_XIDS:
                self._xid_at[error.device_uuid] = self.history.now
            self._xids[key] = error.count
        self._has_snapshot = True

    def _onset_time(self, tracked: TrackedSeries, kind: str, at: float) -> float:
        """Return the onset in Unix time; a step of the wall clock does not move the onset of an active verdict."""
        active = tracked.verdicts.get(kind)
        return self.history.to_unix(at) if active is None else active.since


def _current_verdicts(tracked: TrackedSeries, replacements: Mapping[SeriesKey, Verdict | None]) -> Iterator[Verdict]:
    """Yield the verdicts of a series, its leak replaced by the verdict of its group."""
    for verdict in tracked.verdicts.values():
        shown = replacements.get(tracked.key, verdict) if verdict.kind == "leak" else verdict
        if shown is not None:
            yield shown


def _lists_all(device: DeviceReading, snapshot: Snapshot) -> bool:
    """Return whether memory without a listed process has no process: the driver lists those of this pid namespace."""
    if snapshot.private_pid_namespace and device.vendor != "sim":
        return False
    return not any(
        fault.kind == "processes_hidden" and fault.device_uuid in (None, device.uuid) for fault in snapshot.faults
    )


def _label(device: DeviceReading) -> str:
    return f"GPU {device.index}"


class LeakGroups:
    """Groups of series that leak together. The series that represents a group stays the same while it leaks itself."""

    def __init__(self) -> None:
        self._representatives: dict[str, SeriesKey] = {}

    def replacements(self, tracked_series: Collection[TrackedSeries]) -> dict[SeriesKey, Verdict | None]:
        """Return the verdicts that replace the series' own leak; None if the verdict of another series includes it."""
        leaking: defaultdict[str, list[TrackedSeries]] = defaultdict(list)
        for tracked in tracked_series:
            if tracked.leak is not None and tracked.process is not None and "leak" in tracked.verdicts:
                leaking[tracked.name].append(tracked)
        replacements: dict[SeriesKey, Verdict | None] = {}
        self._representatives = {
            name: representative for name, representative in self._representatives.items() if name in leaking
        }
        for name, same_name in leaking.items():
            group = (
                _largest_simultaneous_group(same_name)
                if len({tracked.uuid for tracked in same_name}) >= MIN_GROUP_DEVICES * MIN_GROUP_RATIO
                else []
            )
            peers = (
                [tracked for tracked in tracked_series if tracked.name == name and tracked.process is not None]
                if group
                else []
            )
            if len({tracked.uuid for tracked in peers}) < MIN_GROUP_DEVICES or len(group) < MIN_GROUP_RATIO * len(
                peers
            ):
                self._representatives.pop(name, None)
                continue
            replacements.update((tracked.key, None) for tracked in group)
            representative = self._representative(name, group)
            replacements[representative.key] = _group_verdict(representative, group)
        return replacements

    def _representative(self, name: str, group: Collection[TrackedSeries]) -> TrackedSeries:
        key = self._representatives.get(name)
        representative = next((tracked for tracked in group if tracked.key == key), None)
        if representative is None:
            representative = max(group, key=lambda tracked: tracked.leak.growth_bytes if tracked.leak else 0.0)
            self._representatives[name] = representative.key
        return representative


def _largest_simultaneous_group(same_name: Collection[TrackedSeries]) -> list[TrackedSeries]:
    """Return the largest group whose onsets lie within one window; the earliest of such groups."""
    onsets = sorted((tracked.leak.onset, i) for i, tracked in enumerate(same_name) if tracked.leak is not None)
    ordered = list(same_name)
    groups = (
        [ordered[i] for onset, i in onsets if begin <= onset <= begin + GROUP_ONSET_SECONDS] for begin, _ in onsets
    )
    return max(groups, key=len, default=[])


def _group_verdict(representative: TrackedSeries, group: Collection[TrackedSeries]) -> Verdict:
    """Return the representative's verdict, with the time, the fit and the text of the program that is the first to
    fill its device."""
    verdict = representative.verdicts["leak"]
    count, devices = len(group), len({tracked.uuid for tracked in group})
    evidence = dict(verdict.evidence) | {"processes": float(count), "devices": float(devices)}
    soonest = min((representative, *group), key=_seconds_left)
    earliest = soonest.verdicts["leak"]
    fit = earliest.fit
    if fit is not None and soonest is not representative:
        fit = replace(fit, device_uuid=soonest.uuid, pid=soonest.pid)
    return replace(
        verdict,
        evidence=tuple(evidence.items()),
        time_to_full_seconds=earliest.time_to_full_seconds,
        fit=fit,
        summary=sentences.growing_together(earliest.summary, count, devices, earliest.time_to_full_seconds),
    )


def _seconds_left(tracked: TrackedSeries) -> float:
    """Return the seconds until the leak has filled its device; infinity if they are unknown."""
    seconds = tracked.verdicts["leak"].time_to_full_seconds
    return inf if seconds is None else seconds


def diagnose(before: Diagnosis, snapshot: Snapshot) -> Diagnosis:
    """Return the diagnosis after ``snapshot``: a function of the sequence of snapshots alone.

    Durations are those of ``elapsed_seconds``; a snapshot that is not newer than the last one changes nothing.
    ``before`` is changed, so no old one is used.
    """
    if before.add(snapshot):
        before.verdicts = before.active_verdicts()
    return before
