"""Values that need more than one snapshot: increases of counters, peaks, agents that stopped reporting. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import NamedTuple

from gpumond.diagnosis.detectors import fragmented_ratio, unreclaimable_bytes
from gpumond.diagnosis.failed_allocation import FailedAllocation
from gpumond.events import program_line_clause
from gpumond.facts.frame import Frame, Ledger
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import Oom, ProcessKey, Program
from gpumond.facts.snapshot import MAX_MISSED_READINGS, AgentReport, Sensors, Snapshot
from gpumond.quantities.device_quantities import DEVICE_COUNTERS
from gpumond.quantities.program_quantities import POOL_COUNTERS

FILL_RATE_SECONDS = 30.0
"""Time over which the speed at which a device fills is measured."""
MIN_OBSERVATION_SECONDS = 60.0
"""Time of observation from which a peak is known."""


class Workload(NamedTuple):
    """A name, and the user of its programs: the same name of another user is another workload."""

    uid: int
    name: str


PoolKey = tuple[ProcessKey, str, str]
"""Process, allocator and UUID of the device"""

XidKey = tuple[str, int]
"""UUID of the device, and the Xid"""


class CounterGrowth(NamedTuple):
    """Last value of a counter, and its increases within the window, each with its time."""

    newest_count: int
    increases: tuple[tuple[float, int], ...] = ()

    @property
    def increase(self) -> int:
        return sum(amount for _, amount in self.increases)


class PoolTrack(NamedTuple):
    """Observations of one pool: first time, last reported peak, and the highest live and unreclaimable bytes per bucket
    of ``BUCKET_SECONDS``.

    Unreclaimable bytes are those that a flush can't release: live and stranded. ``peak_live_bytes`` and
    ``peak_unreclaimable_bytes`` are the maxima of the window.
    """

    since: float
    newest_peak_bytes: int | None
    buckets: tuple[tuple[float, int, int], ...]
    peak_live_bytes: int
    peak_unreclaimable_bytes: int
    ooms: CounterGrowth | None
    retries: CounterGrowth | None
    counters: CounterHistory
    """The pool's counts of ``POOL_COUNTERS``."""
    short_at: float | None = None
    """Last time at which it ran out of the device's memory, or nearly did; its own limit doesn't count."""
    limit_bytes: int | None = None
    """The program's own limit, if that was what it last ran into."""


class OomNote(NamedTuple):
    """The program's own limit, if the error was that it was reached, and the program's own line; empty if unknown."""

    limit_bytes: int | None = None
    code_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleWindow:
    elapsed_seconds: float = 0.0
    pool_tracks: Mapping[PoolKey, PoolTrack] = field(default_factory=dict)
    xid_growth: Mapping[XidKey, CounterGrowth] = field(default_factory=dict)
    workload_by_process: Mapping[ProcessKey, Workload] = field(default_factory=dict)
    """Workload of every process that has an agent, or had one and is still on a device."""
    oom_retries_by_process: Mapping[ProcessKey, CounterGrowth] = field(default_factory=dict)
    """Out-of-memory errors of every process after which `retry_on_oom` tried again."""
    silent_processes: frozenset[ProcessKey] = frozenset()
    """Processes whose agent no longer reports."""
    device_counters: Mapping[str, CounterHistory] = field(default_factory=dict)
    """``DEVICE_COUNTERS`` by UUID."""
    program_counters: Mapping[ProcessKey, CounterHistory] = field(default_factory=dict)
    """``PROGRAM_COUNTERS`` of every process with an agent that reports."""
    free_bytes_history: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    """Times and free bytes of the last ``FILL_RATE_SECONDS``, by device, oldest first."""

    oom_notes: Mapping[tuple[ProcessKey, int], OomNote] = field(default_factory=dict)
    """What is known about each out-of-memory error that is reported. Its agent sends the stack for a minute."""

    def is_short(self, track: PoolTrack) -> bool:
        """Return whether a pool ran out of the device's memory, or nearly did, within the window."""
        return track.short_at is not None and self.elapsed_seconds - track.short_at < WINDOW_SECONDS

    def time_to_full_30s_seconds(self, uuid: str) -> float | None:
        """Return the time until a device is full if it goes on to fill as it did lately; infinite if it does not fill.

        None until the device was read for ``FILL_RATE_SECONDS / 3``.
        """
        readings = self.free_bytes_history.get(uuid, ())
        if not readings or readings[-1][0] - readings[0][0] < FILL_RATE_SECONDS / 3:
            return None
        (since, before), (now, free) = readings[0], readings[-1]
        return free * (now - since) / (before - free) if free < before else inf

    def increase(self, growth: CounterGrowth | None, since: float = 0.0) -> float | None:
        """Return the increase within the window; zero is known only after a whole window."""
        if growth is None:
            return None
        return float(growth.increase) if growth.increases or self.elapsed_seconds - since >= WINDOW_SECONDS else None

    def oom_increase(self, report: AgentReport, track: PoolTrack) -> float | None:
        """Return the increase of a pool's errors within the window, without those after which `retry_on_oom`
        tried again.

        The agent counts the latter by process: where several pools ran out, they are subtracted from the sum.
        """
        increase = self.increase(track.ooms, track.since)
        if not increase:
            return increase
        process = report.key
        retries = self.oom_retries_by_process.get(process)
        if retries is None or not retries.increases:
            return increase
        tracks = [self.pool_tracks[key] for key in {pool_key(process, pool) for pool in report.pools}]
        remaining = max(0, sum(each.ooms.increase for each in tracks if each.ooms) - retries.increase)
        if not remaining and self.elapsed_seconds - track.since < WINDOW_SECONDS:
            return None
        return min(increase, float(remaining))

    def fragmentation_ratio(self, track: PoolTrack) -> float | None:
        """Return 1 - peak live / peak unreclaimable over the window; None until the pool was observed for a minute.

        At a moment of low use a healthy pool looks as fragmented as any; at its peak it does not.
        """
        if self.elapsed_seconds - track.since < MIN_OBSERVATION_SECONDS:
            return None
        return fragmented_ratio(track.peak_live_bytes, track.peak_unreclaimable_bytes)


def pool_key(process: ProcessKey, pool: PoolUsage) -> PoolKey:
    return process, pool.allocator, pool.device_uuid


def next_window(before: RuleWindow, snapshot: Snapshot) -> RuleWindow:
    """Return the window after ``snapshot``."""
    now = snapshot.elapsed_seconds
    reports = snapshot.reports_by_process
    workload_by_process = {process: Workload(report.uid, report.workload) for process, report in reports.items()}
    oom_notes = {
        (process, oom.number): _oom_note(before.oom_notes.get((process, oom.number)), oom, report, snapshot)
        for process, report in reports.items()
        for oom in report.program.ooms
    }
    silent = _still_on_devices(before.workload_by_process.keys() - workload_by_process.keys(), snapshot)
    pool_tracks: dict[PoolKey, PoolTrack] = {}
    oom_retries: dict[ProcessKey, CounterGrowth] = {}
    program_counters: dict[ProcessKey, CounterHistory] = {}
    for process, report in reports.items():
        for usage in report.pools:
            pool = pool_key(process, usage)
            track = before.pool_tracks.get(pool)
            pool_tracks[pool] = after = (
                track if track and process in snapshot.possibly_suspended else _next_track(track, usage, now)
            )
            if track and _ran_short(track, after):
                limit = _own_limit(process, usage.device_uuid, snapshot)
                pool_tracks[pool] = after._replace(limit_bytes=limit, short_at=now if limit is None else after.short_at)
        if report.program.oom_retries:
            base = CounterGrowth(0 if process in before.workload_by_process else report.program.oom_retries)
            oom_retries[process] = _next_growth(
                before.oom_retries_by_process.get(process, base), report.program.oom_retries, now
            )
        history = before.program_counters.get(process)
        if history is None or history.is_due(now):
            history = _next_history(history, program_counts(report.program), now)
        program_counters[process] = history
    if silent:
        workload_by_process.update((process, before.workload_by_process[process]) for process in silent)
        pool_tracks.update((pool, track) for pool, track in before.pool_tracks.items() if pool[0] in silent)
        oom_retries.update(
            (process, growth) for process, growth in before.oom_retries_by_process.items() if process in silent
        )
    # The count of an Xid starts with the daemon, so its first report is an increase.
    xid_growth = {
        (error.device_uuid, error.xid): _next_growth(
            before.xid_growth.get((error.device_uuid, error.xid), NO_GROWTH), error.count, now
        )
        for error in snapshot.xids
    }
    device_counters: dict[str, CounterHistory] = {}
    free_bytes_history: dict[str, tuple[tuple[float, int], ...]] = {}
    for device in snapshot.devices:
        history = before.device_counters.get(device.uuid)
        if history is None or history.is_due(now):
            history = _next_history(history, device_counts(device.sensors), now)
        device_counters[device.uuid] = history
        if device.free_bytes is not None:
            readings = before.free_bytes_history.get(device.uuid, ())
            in_window = tuple(each for each in readings if each[0] > now - FILL_RATE_SECONDS)
            free_bytes_history[device.uuid] = (*in_window, (now, device.free_bytes))
    return RuleWindow(
        elapsed_seconds=now,
        pool_tracks=pool_tracks,
        xid_growth=xid_growth,
        workload_by_process=workload_by_process,
        oom_retries_by_process=oom_retries,
        silent_processes=silent,
        device_counters=device_counters,
        program_counters=program_counters,
        free_bytes_history=free_bytes_history,
        oom_notes=oom_notes,
    )


NO_GROWTH = CounterGrowth(0)

device_counts: Callable[[Sensors], Counts] = attrgetter(*DEVICE_COUNTERS)
pool_counts: Callable[[PoolUsage], Counts] = attrgetter(*POOL_COUNTERS)


def program_counts(program: Program) -> Counts:
    steps, retries = (None, None) if program.step is None else (program.step.steps, program.step.retries)
    return steps, retries, program.oom_retries, program.oom_recovered, program.refusals


def _next_history(history: CounterHistory | None, counts: Counts, now: float) -> CounterHistory:
    return new_counter_history(counts, now) if history is None else history.with_sample(counts, now)


def _still_on_devices(processes: Set[ProcessKey], snapshot: Snapshot) -> frozenset[ProcessKey]:
    """Return those of the processes that are on a device; all of them while a device isn't read completely."""
    if not processes or unlisted_devices(snapshot):
        return frozenset(processes)
    if any(device.missed_readings >= MAX_MISSED_READINGS for device in snapshot.devices):
        return frozenset(processes)
    return frozenset(
        process
        for device in snapshot.devices
        for process, usage in device.processes_by_key.items()
        if process in processes and usage.state != "gone"
    )


def unlisted_devices(snapshot: Snapshot) -> frozenset[str]:
    """Return the devices whose process list could not be read now, without those that never have one."""
    if not snapshot.faults:
        return frozenset()
    faulty_uuids = {fault.device_uuid for fault in snapshot.faults}
    return frozenset(each.uuid for each in snapshot.devices if each.processes is None and each.uuid in faulty_uuids)


def _next_track(before: PoolTrack | None, pool: PoolUsage, now: float) -> PoolTrack:
    peak, live = pool.peak_live_bytes, unreclaimable_bytes(pool) if pool.live_bytes is None else pool.live_bytes
    if peak is not None and peak > live and (before is None or peak != before.newest_peak_bytes):
        live = peak  # a peak that rose was reached within this bucket, however short it was
    unreclaimable = max(live, unreclaimable_bytes(pool))
    if before is not None and not unreclaimable and before.peak_unreclaimable_bytes:
        # The pool has freed all, so nothing is fragmented.
        before = before._replace(buckets=((now, 0, 0),), peak_live_bytes=0, peak_unreclaimable_bytes=0)
    if before is None:
        ooms, retries = (None if count is None else CounterGrowth(count) for count in (pool.ooms, pool.retries))
        return PoolTrack(
            since=now,
            newest_peak_bytes=peak,
            buckets=((now, live, unreclaimable),),
            peak_live_bytes=live,
            peak_unreclaimable_bytes=unreclaimable,
            ooms=ooms,
            retries=retries,
            counters=new_counter_history(pool_counts(pool), now),
        )
    counters = before.counters
    ooms = _growth_or_none(before.ooms, pool.ooms, now)
    retries = _growth_or_none(before.retries, pool.retries, now)
    newest = before.buckets[-1]
    if now - newest[0] >= BUCKET_SECONDS:
        earlier = (bucket for bucket in before.buckets if bucket[0] > now - WINDOW_SECONDS)
        buckets = (*earlier, (now, live, unreclaimable))
        counters = counters.with_sample(pool_counts(pool), now)
        peak_live, peak_unreclaimable = max(each[1] for each in buckets), max(each[2] for each in buckets)
    elif live > newest[1] or unreclaimable > newest[2]:
        buckets = (*before.buckets[:-1], (newest[0], max(newest[1], live), max(newest[2], unreclaimable)))
        peak_live = max(before.peak_live_bytes, live)
        peak_unreclaimable = max(before.peak_unreclaimable_bytes, unreclaimable)
    elif ooms is before.ooms and retries is before.retries and peak == before.newest_peak_bytes:
        return before  # nearly every pool of nearly every tick
    else:
        buckets, peak_live, peak_unreclaimable = before.buckets, before.peak_live_bytes, before.peak_unreclaimable_bytes
    return PoolTrack(
        since=before.since,
        newest_peak_bytes=peak,
        buckets=buckets,
        peak_live_bytes=peak_live,
        peak_unreclaimable_bytes=peak_unreclaimable,
        ooms=ooms,
        retries=retries,
        counters=counters,
        short_at=before.short_at,
        limit_bytes=before.limit_bytes,
    )


def _ran_short(before: PoolTrack, track: PoolTrack) -> bool:
    counts = () if track is before else ((before.ooms, track.ooms), (before.retries, track.retries))
    return any(earlier and after and after.newest_count > earlier.newest_count for earlier, after in counts)


def _own_limit(process: ProcessKey, uuid: str, snapshot: Snapshot) -> int | None:
    """Return the process's own limit if it leaves less than what is free on the device."""
    device, limit = snapshot.device(uuid), snapshot.limits.get((uuid, process))
    if device is None or limit is None or device.current_free_bytes is None:
        return None
    return limit if limit - (snapshot.used_by(process, device) or 0) < device.current_free_bytes else None


def _oom_note(before: OomNote | None, oom: Oom, report: AgentReport, snapshot: Snapshot) -> OomNote:
    """Return what is known about an error. ``before``: what was known with the last snapshot, if it isn't new."""
    code_line = program_line_clause(oom.stack)
    if before is not None:
        return before._replace(code_line=code_line) if code_line else before
    return OomNote(FailedAllocation(oom, report, Frame(snapshot, Ledger())).limit_reached_bytes, code_line)


def _growth_or_none(growth: CounterGrowth | None, count: int | None, now: float) -> CounterGrowth | None:
    if count is None or (growth is not None and not growth.increases and count == growth.newest_count):
        return growth
    return CounterGrowth(count) if growth is None else _next_growth(growth, count, now)


def _next_growth(growth: CounterGrowth, count: int, now: float) -> CounterGrowth:
    increases = growth.increases
    if increases and increases[0][0] <= now - WINDOW_SECONDS:
        increases = tuple(entry for entry in increases if entry[0] > now - WINDOW_SECONDS)
    amount = count - growth.newest_count if count >= growth.newest_count else count  # the counter was reset
    if amount and increases and now - increases[-1][0] < BUCKET_SECONDS:
        increases = (*increases[:-1], (increases[-1][0], increases[-1][1] + amount))
    elif amount:
        increases = (*increases, (now, amount))
    return growth if increases is growth.increases and count == growth.newest_count else CounterGrowth(count, increases)


WINDOW_SECONDS = 600.0
BUCKET_SECONDS = 30.0
"""Step by which the window moves."""

Counts = tuple[float | None, ...]
"""Counts of one subject, in a fixed order; None is unknown."""


class CounterHistory(NamedTuple):
    """The time of a subject's first observation, and its counts at times within the window, oldest first.

    Of consecutive samples with the same counts, only the first and the last are kept.
    """

    since: float
    samples: tuple[tuple[float, Counts], ...]

    def is_due(self, now: float) -> bool:
        """Return True if the counts at ``now`` are to be kept."""
        return now - self.samples[-1][0] >= BUCKET_SECONDS

    def with_sample(self, counts: Counts, now: float) -> CounterHistory:
        samples = [sample for sample in self.samples if sample[0] > now - WINDOW_SECONDS]
        if len(samples) > 1 and samples[-1][1] == samples[-2][1] == counts:
            counts = samples.pop()[1]
        return self._replace(samples=(*samples, (now, counts)))

    def increase(self, position: int, count: float | None, now: float) -> float | None:
        """Return the increase of one counter to ``count``; zero is known only after a whole window.

        A counter that became smaller was reset: its new count is an increase.
        """
        counts_in_window = [counts[position] for at, counts in self.samples if at > now - WINDOW_SECONDS]
        values = [value for value in (*counts_in_window, count) if value is not None]
        if count is None or len(values) < 2:
            return None
        growth = sum(later - earlier if later >= earlier else later for earlier, later in pairwise(values))
        return float(growth) if growth or now - self.since >= WINDOW_SECONDS else None


def new_counter_history(counts: Counts, now: float) -> CounterHistory:
    return CounterHistory(now, ((now, counts),))


def sum_of_known(increases: tuple[float | None, ...]) -> float | None:
    """Return the sum of the known increases; None if none is known."""
    measured = [increase for increase in increases if increase is not None]
    return sum(measured) if measured else None
