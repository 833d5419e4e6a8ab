"""Values that need more than one snapshot: increases of counters, peaks, agents that stopped reporting. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

FILL_SECONDS = 30.0
"""Time over which the speed is taken at which a device fills, in seconds."""
OBSERVED_SECONDS = 60.0
"""Time of observation from which a peak is known, in seconds."""


class Workload(NamedTuple):
    """A name, and the user of its programs: the same name of another user is another workload."""

    uid: int
    name: str


Pool = tuple[ProcessKey, str, str]
"""Process, allocator and device UUID"""

Xid = tuple[str, int]
"""(device UUID, number)"""


class CounterGrowth(NamedTuple):
    """Last value of a counter, and its increases within the window, by step."""

    last: int
    grown: tuple[tuple[float, int], ...] = ()

    @property
    def increase(self) -> int:
        return sum(amount for _, amount in self.grown)


class PoolTrack(NamedTuple):
    """Observations of one pool: first time, last reported peak, and the highest live and unreclaimable bytes per step.

    *Kept* bytes are those that a flush can't release: held less reclaimable, that is live and stranded. ``live`` and
    ``unreclaimable`` are the maxima of the window.
    """

    since: float
    reported: int | None
    steps: tuple[tuple[float, int, int], ...]
    live: int
    unreclaimable: int
    ooms: CounterGrowth | None
    retries: CounterGrowth | None
    counters: CounterHistory
    """Those of ``POOL_COUNTERS``."""
    short_at: float | None = None
    """Last time at which it ran out of the device's memory, or nearly did; its own limit doesn't count."""
    limit: int | None = None
    """The program's own limit, if that was what it last ran into."""


class OomNote(NamedTuple):
    """The program's own limit, if the error was that it was reached, and the program's own line; empty if unknown."""

    limit: int | None = None
    code_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleWindow:
    elapsed: float = 0.0
    pools: Mapping[Pool, PoolTrack] = field(default_factory=dict)
    xids: Mapping[Xid, CounterGrowth] = field(default_factory=dict)
    agents: Mapping[ProcessKey, Workload] = field(default_factory=dict)
    """Workload of every process that has an agent, or had one and is still on a device."""
    retried: Mapping[ProcessKey, CounterGrowth] = field(default_factory=dict)
    """Out-of-memory errors of every process after which `retry_on_oom` tried again."""
    silent: frozenset[ProcessKey] = frozenset()
    """Processes whose agent no longer reports."""
    devices: Mapping[str, CounterHistory] = field(default_factory=dict)
    """``DEVICE_COUNTERS`` by UUID."""
    programs: Mapping[ProcessKey, CounterHistory] = field(default_factory=dict)
    """``PROGRAM_COUNTERS`` of every process with an agent that reports."""
    free: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    """Times and free bytes of the last ``FILL_SECONDS``, by device, oldest first."""

    ooms_by_number: Mapping[tuple[ProcessKey, int], OomNote] = field(default_factory=dict)
    """What is known about each out-of-memory error that is reported. Its agent sends the stack for a minute."""

    def is_short(self, track: PoolTrack) -> bool:
        """Return whether a pool ran out of the device's memory, or nearly did, within the window."""
        return track.short_at is not None and self.elapsed - track.short_at < WINDOW_SECONDS

    def time_to_full_30s_seconds(self, uuid: str) -> float | None:
        """Return the time until a device is full if it goes on to fill as it did lately; infinite if it does not fill.

        None until it was read for ``FILL_SECONDS / 3``.
        """
        readings = self.free.get(uuid, ())
        if not readings or readings[-1][0] - readings[0][0] < FILL_SECONDS / 3:
            return None
        (since, before), (now, free) = readings[0], readings[-1]
        return free * (now - since) / (before - free) if free < before else inf

    def increase(self, growth: CounterGrowth | None, since: float = 0.0) -> float | None:
        """Return the increase within the window; zero is known only after a whole window."""
        if growth is None:
            return None
        return float(growth.increase) if growth.grown or self.elapsed - since >= WINDOW_SECONDS else None

    def oom_increase(self, report: AgentReport, track: PoolTrack) -> float | None:
        """Return the increase of a pool's errors within the window, without those after which `retry_on_oom`
        tried again.

        The agent counts the latter by process: where several pools ran out, they are subtracted from the sum.
        """
        grown = self.increase(track.ooms, track.since)
        if not grown:
            return grown
        process = report.key
        retried = self.retried.get(process)
        if retried is None or not retried.grown:
            return grown
        tracks = [self.pools[key] for key in {pool_of(process, pool) for pool in report.pools}]
        left = max(0, sum(each.ooms.increase for each in tracks if each.ooms) - retried.increase)
        if not left and self.elapsed - track.since < WINDOW_SECONDS:
            return None
        return min(grown, float(left))

    def fragmentation(self, track: PoolTrack) -> float | None:
        """Return 1 - peak live / peak unreclaimable over the window; None until it was observed for a minute.

        At a moment of low use a healthy pool looks as fragmented as any; at its peak it does not.
        """
        if self.elapsed - track.since < OBSERVED_SECONDS:
            return None
        return fragmented_ratio(track.live, track.unreclaimable)


def pool_of(process: ProcessKey, pool: PoolUsage) -> Pool:
    return process, pool.allocator, pool.device_uuid


def next_window(before: RuleWindow, snapshot: Snapshot) -> RuleWindow:
    """Return the window after ``snapshot``."""
    elapsed = snapshot.elapsed_seconds
    reports = snapshot.reports_by_process
    agents = {process: Workload(report.uid, report.workload) for process, report in reports.items()}
    notes = {
        (process, oom.number): _note(before.ooms_by_number.get((process, oom.number)), oom, report, snapshot)
        for process, report in reports.items()
        for oom in report.program.ooms
    }
    silent = frozenset(before.agents.keys() - agents.keys()) & _present(before, agents, snapshot)
    pools: dict[Pool, PoolTrack] = {}
    retried: dict[ProcessKey, CounterGrowth] = {}
    programs: dict[ProcessKey, CounterHistory] = {}
    for process, report in reports.items():
        for usage in report.pools:
            pool = pool_of(process, usage)
            track = before.pools.get(pool)
            pools[pool] = now = track if track and process in snapshot.suspended else _track(track, usage, elapsed)
            if track and _ran_short(track, now):
                limit = _own_limit(process, usage.device_uuid, snapshot)
                pools[pool] = now._replace(limit=limit, short_at=elapsed if limit is None else now.short_at)
        if report.program.oom_retries:
            base = CounterGrowth(0 if process in before.agents else report.program.oom_retries)
            retried[process] = _grown(before.retried.get(process, base), report.program.oom_retries, elapsed)
        history = before.programs.get(process)
        if history is None or history.is_due(elapsed):
            history = _marked(history, program_counts(report.program), elapsed)
        programs[process] = history
    if silent:
        agents.update((who, before.agents[who]) for who in silent)
        pools.update((pool, track) for pool, track in before.pools.items() if pool[0] in silent)
        retried.update((who, growth) for who, growth in before.retried.items() if who in silent)
    # The count of an Xid starts with the daemon, so its first report is an increase.
    xids = {
        (error.device_uuid, error.xid): _grown(
            before.xids.get((error.device_uuid, error.xid), NONE), error.count, elapsed
        )
        for error in snapshot.xids
    }
    devices: dict[str, CounterHistory] = {}
    free: dict[str, tuple[tuple[float, int], ...]] = {}
    for device in snapshot.devices:
        history = before.devices.get(device.uuid)
        if history is None or history.is_due(elapsed):
            history = _marked(history, device_counts(device.sensors), elapsed)
        devices[device.uuid] = history
        if device.free_bytes is not None:
            recent = before.free.get(device.uuid, ())
            kept = tuple(each for each in recent if each[0] > elapsed - FILL_SECONDS)
            free[device.uuid] = (*kept, (elapsed, device.free_bytes))
    return RuleWindow(
        elapsed=elapsed,
        pools=pools,
        xids=xids,
        agents=agents,
        retried=retried,
        silent=silent,
        devices=devices,
        programs=programs,
        free=free,
        ooms_by_number=notes,
    )


NONE = CounterGrowth(0)

device_counts: Callable[[Sensors], Counts] = attrgetter(*DEVICE_COUNTERS)
pool_counts: Callable[[PoolUsage], Counts] = attrgetter(*POOL_COUNTERS)


def program_counts(program: Program) -> Counts:
    steps, retries = (None, None) if program.step is None else (program.step.steps, program.step.retries)
    return steps, retries, program.oom_retries, program.oom_recovered, program.refusals


def _marked(history: CounterHistory | None, counts: Counts, elapsed: float) -> CounterHistory:
    return first_observation(counts, elapsed) if history is None else history.marked(counts, elapsed)


def _present(before: RuleWindow, reporting: Mapping[ProcessKey, Workload], snapshot: Snapshot) -> frozenset[ProcessKey]:
    """Return the processes that are on a device; all previous ones while a device is not read completely."""
    if before.agents.keys() <= reporting.keys():
        return frozenset()  # not needed: every agent reports
    if unlisted_devices(snapshot) or any(device.missed_readings >= MAX_MISSED_READINGS for device in snapshot.devices):
        return frozenset(before.agents)
    return frozenset(
        process
        for device in snapshot.devices
        for process, usage in device.processes_by_key.items()
        if usage.state != "gone"
    )


def unlisted_devices(snapshot: Snapshot) -> frozenset[str]:
    """Return the devices whose process list could not be read now, without those that never have one."""
    if not snapshot.faults:
        return frozenset()
    at_fault = {fault.device_uuid for fault in snapshot.faults}
    return frozenset(each.uuid for each in snapshot.devices if each.processes is None and each.uuid in at_fault)


def _track(before: PoolTrack | None, pool: PoolUsage, elapsed: float) -> PoolTrack:
    peak, live = pool.peak_live_bytes, unreclaimable_bytes(pool) if pool.live_bytes is None else pool.live_bytes
    if peak is not None and peak > live and (before is None or peak != before.reported):
        live = peak  # a peak that rose was reached within this step, however short it was
    unreclaimable = max(live, unreclaimable_bytes(pool))
    if before is not None and not unreclaimable and before.unreclaimable:  # it has freed all, so nothing is fragmented
        before = before._replace(steps=((elapsed, 0, 0),), live=0, unreclaimable=0)
    if before is None:
        ooms, retries = (None if count is None else CounterGrowth(count) for count in (pool.ooms, pool.retries))
        return PoolTrack(
            since=elapsed,
            reported=peak,
            steps=((elapsed, live, unreclaimable),),
            live=live,
            unreclaimable=unreclaimable,
            ooms=ooms,
            retries=retries,
            counters=first_observation(pool_counts(pool), elapsed),
        )
    counters = before.counters
    ooms, retries = _counted(before.ooms, pool.ooms, elapsed), _counted(before.retries, pool.retries, elapsed)
    last = before.steps[-1]
    if elapsed - last[0] >= BUCKET_SECONDS:
        earlier = (step for step in before.steps if step[0] > elapsed - WINDOW_SECONDS)
        steps = (*earlier, (elapsed, live, unreclaimable))
        counters = counters.marked(pool_counts(pool), elapsed)
        most_live, most_unreclaimable = max(step[1] for step in steps), max(step[2] for step in steps)
    elif live > last[1] or unreclaimable > last[2]:
        steps = (*before.steps[:-1], (last[0], max(last[1], live), max(last[2], unreclaimable)))
        most_live, most_unreclaimable = max(before.live, live), max(before.unreclaimable, unreclaimable)
    elif ooms is before.ooms and retries is before.retries and peak == before.reported:
        return before  # nearly every pool of nearly every tick
    else:
        steps, most_live, most_unreclaimable = before.steps, before.live, before.unreclaimable
    return PoolTrack(
        since=before.since,
        reported=peak,
        steps=steps,
        live=most_live,
        unreclaimable=most_unreclaimable,
        ooms=ooms,
        retries=retries,
        counters=counters,
        short_at=before.short_at,
        limit=before.limit,
    )


def _ran_short(before: PoolTrack, track: PoolTrack) -> bool:
    counts = () if track is before else ((before.ooms, track.ooms), (before.retries, track.retries))
    return any(earlier and now and now.last > earlier.last for earlier, now in counts)


def _own_limit(process: ProcessKey, uuid: str, snapshot: Snapshot) -> int | None:
    """Return the process's own limit if it leaves less than what is free on the device."""
    device, limit = snapshot.device(uuid), snapshot.limits.get((uuid, process))
    if device is None or limit is None or device.current_free_bytes is None:
        return None
    return limit if limit - (snapshot.used_by(process, device) or 0) < device.current_free_bytes else None


def _note(before: OomNote | None, oom: Oom, report: AgentReport, snapshot: Snapshot) -> OomNote:
    """Return what is known about an error. ``before``: what was known with the last snapshot, if it isn't new."""
    code_line = program_line_clause(oom.stack)
    if before is not None:
        return before._replace(code_line=code_line) if code_line else before
    return OomNote(FailedAllocation(oom, report, Frame(snapshot, Ledger())).limit_reached_bytes, code_line)


def _counted(growth: CounterGrowth | None, count: int | None, elapsed: float) -> CounterGrowth | None:
    if count is None or (growth is not None and not growth.grown and count == growth.last):
        return growth
    return CounterGrowth(count) if growth is None else _grown(growth, count, elapsed)


def _grown(growth: CounterGrowth, count: int, elapsed: float) -> CounterGrowth:
    grown = growth.grown
    if grown and grown[0][0] <= elapsed - WINDOW_SECONDS:
        grown = tuple(entry for entry in grown if entry[0] > elapsed - WINDOW_SECONDS)
    amount = count - growth.last if count >= growth.last else count  # the counter was reset
    if amount and grown and elapsed - grown[-1][0] < BUCKET_SECONDS:
        grown = (*grown[:-1], (grown[-1][0], grown[-1][1] + amount))
    elif amount:
        grown = (*grown, (elapsed, amount))
    return growth if grown is growth.grown and count == growth.last else CounterGrowth(count, grown)


WINDOW_SECONDS = 600.0
BUCKET_SECONDS = 30.0
"""Step by which the window moves, in seconds."""

Counts = tuple[float | None, ...]
"""Counts of one subject, in a fixed order; None is unknown."""


class CounterHistory(NamedTuple):
    """The first observation of a subject, and its counts at times within the window, oldest first.

    Of consecutive marks with the same counts, only the first and the last are kept.
    """

    since: float
    marks: tuple[tuple[float, Counts], ...]

    def is_due(self, elapsed: float) -> bool:
        """Return True if the counts of ``elapsed`` are to be kept."""
        return elapsed - self.marks[-1][0] >= BUCKET_SECONDS

    def marked(self, counts: Counts, elapsed: float) -> CounterHistory:
        kept = [mark for mark in self.marks if mark[0] > elapsed - WINDOW_SECONDS]
        if len(kept) > 1 and kept[-1][1] == kept[-2][1] == counts:
            counts = kept.pop()[1]
        return self._replace(marks=(*kept, (elapsed, counts)))

    def increase(self, position: int, count: float | None, elapsed: float) -> float | None:
        """Return the increase of one counter to ``count``; zero is known only after a whole window.

        A counter that became smaller was reset: its new count is an increase.
        """
        known = [counts[position] for at, counts in self.marks if at > elapsed - WINDOW_SECONDS]
        values = [value for value in (*known, count) if value is not None]
        if count is None or len(values) < 2:
            return None
        grown = sum(later - earlier if later >= earlier else later for earlier, later in pairwise(values))
        return float(grown) if grown or elapsed - self.since >= WINDOW_SECONDS else None


def first_observation(counts: Counts, elapsed: float) -> CounterHistory:
    return CounterHistory(elapsed, ((elapsed, counts),))


def sum_of_known(increases: tuple[float | None, ...]) -> float | None:
    """Return the sum of the known increases; None if none is known."""
    known = [increase for increase in increases if increase is not None]
    return sum(known) if known else None
