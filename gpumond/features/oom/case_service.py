"""Cases in the daemon: made from the evidence of each new record of an agent, stored, and named in alerts."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpumond.core import Core, Part, Tick
from gpumond.facts.frame import Alert, Frame, LedgerLine
from gpumond.facts.program import ProcessKey
from gpumond.facts.shares import Share
from gpumond.facts.snapshot import DeviceReading, ProcessUsage
from gpumond.facts.units import size_text
from gpumond.features.oom.case import Curve, OomCase, RankError, Remedy, Timeline, rank_errors, with_repeats
from gpumond.features.oom.remedies import Evidence, remedies, summary_sentence
from gpumond.host.tasks import Tasks
from gpumond.store.table import Table
from gpumond.tick.history import History, HistorySignal, Point, SeriesKey

log = logging.getLogger(__name__)

MAX_CASES, MAX_CASES_PER_PROCESS = 200, 10
"""Cases that are kept, in all and of one process. The oldest are removed."""
FRAME_RETENTION_SECONDS = 2.0
"""Age up to which frames are kept to find the last one before an error: an agent reports it up to a second later."""
PEAK_SECONDS = 60.0
"""Time before an error in which another device must have had room."""
CASE_ANNOTATION = "case"
RULES_WITH_CASE = frozenset({"out-of-memory"})
"""Rules whose alerts name the case."""
LATEST = "last"
"""The name of the newest case in place of its id."""


class Cases:
    """The cases, oldest first."""

    def __init__(self, cases: Sequence[OomCase] = ()) -> None:
        self._cases = {case.id: case for case in cases}

    def __contains__(self, id: str) -> bool:
        return id in self._cases

    def all(self) -> tuple[OomCase, ...]:
        return tuple(self._cases.values())

    def find(self, id: str) -> OomCase | None:
        """Return the case with this id, or the newest for ``last``; None if there is none."""
        return next(reversed(self._cases.values()), None) if id == LATEST else self._cases.get(id)

    def rank_errors(self, case: OomCase) -> tuple[RankError, ...]:
        return rank_errors(case, self.all())

    def of_alert(self, process: ProcessKey, uuid: str | None) -> OomCase | None:
        """Return the newest case of a process on the alert's device, if possible one with remedies."""
        cases = [each for each in self._cases.values() if each.process == process and each.device_uuid in (uuid, None)]
        return max(reversed(cases), key=lambda case: bool(case.known_remedies), default=None)

    def newest_error_numbers(self) -> Mapping[ProcessKey, int]:
        """Return the number of each process's newest error that has a case."""
        numbers: dict[ProcessKey, int] = {}
        for each in self._cases.values():
            if each.oom is not None:
                numbers[each.process] = max(each.oom.number, numbers.get(each.process, 0))
        return numbers

    def merged_with_earlier(self, case: OomCase) -> OomCase:
        """Return a new case, as one with the case of the same program at the same limit if there is one.

        A report has the newest records only: earlier errors whose records are missing are counted with the next one.
        """
        cause = case.process, case.device_uuid, case.limit_bytes
        same = (
            each
            for each in self._cases.values()
            if case.limit_bytes is not None and (each.process, each.device_uuid, each.limit_bytes) == cause
        )
        before = next(same, None)
        if before is None or case.oom is None:
            return case
        return with_repeats(before, case, case.oom.number - self.newest_error_numbers()[case.process])

    def add(self, case: OomCase) -> list[str]:
        """Add a case as the newest, and return the ids of those that are removed for it."""
        self._cases.pop(case.id, None)
        self._cases[case.id] = case
        removed = []
        counts = Counter(each.process for each in self._cases.values())
        for id, each in list(self._cases.items()):
            if counts[each.process] > MAX_CASES_PER_PROCESS or len(self._cases) > MAX_CASES:
                counts[each.process] -= 1
                del self._cases[id]
                removed.append(id)
        return removed


class OomPart(Part):
    table = "oom_cases"

    def __init__(self, core: Core) -> None:
        self._core = core
        self._table = Table(core.store, "oom_cases", OomCase, key="id")
        self.cases = Cases()
        self.loaded = False
        self._frames: deque[Frame] = deque()
        self._processes_with_agent: set[ProcessKey] = set()
        """Processes that had an agent: it leaves before the driver has freed the memory."""
        self._new_cases: list[tuple[OomCase, list[str]]] = []
        self._tasks = Tasks()
        core.provide(Cases, self.cases)

    async def load(self) -> Sequence[str]:
        rows = await self._table.rows()
        stored = sorted((row.value for row in rows), key=lambda case: case.at)
        later = [case for case in self.cases.all() if case.id not in {row.name for row in rows}]
        self.cases = Cases([*stored, *later])
        self._core.provide(Cases, self.cases)
        self.loaded = True
        return ()

    def conclude(self, tick: Tick) -> Tick:
        frame = tick.frame
        for case in (*self._reported_cases(tick), *self._opaque_cases(frame)):
            if case.id not in self.cases:
                merged = self.cases.merged_with_earlier(case)
                self._new_cases.append((merged, self.cases.add(merged)))
        self._frames.append(frame)
        while len(self._frames) > 1 and _age_seconds(self._frames[1], frame) >= FRAME_RETENTION_SECONDS:
            self._frames.popleft()
        reporting = frame.snapshot.reports_by_process.keys()
        self._processes_with_agent = reporting | set(
            filter(frame.snapshot.may_contain, self._processes_with_agent - reporting)
        )
        annotated = replace(frame, alerts=tuple(map(self._annotate, frame.alerts)))
        return replace(tick, frame=annotated, raised=tuple(map(self._annotate, tick.raised)))

    def act(self, tick: Tick) -> None:
        new, self._new_cases = self._new_cases, []
        for case, removed in new:
            log.info("case %s: %s", case.id, case.summary)
            self._tasks.start(self._table.try_put(case.id, case, removed))

    async def close(self) -> None:
        await self._tasks.finish()

    def _reported_cases(self, tick: Tick) -> Iterator[OomCase]:
        since, numbers = self._core.started_at, self.cases.newest_error_numbers()
        for report in (*tick.exited_reports, *tick.frame.snapshot.reports):
            for oom in report.program.ooms:
                if oom.at >= since and oom.number > numbers.get(report.key, 0):
                    before, history = self._frame_before(oom.at, tick.frame), self._core.history
                    peaks = recent_peaks(before, history)
                    yield case_of(Evidence(oom, report, before, tick.frame.verdicts, peaks), history)

    def _frame_before(self, at: float, frame: Frame) -> Frame:
        """Return the last frame before a time, or the oldest."""
        earlier = [each for each in self._frames if each.snapshot.taken_at <= at]
        return earlier[-1] if earlier else self._frames[0] if self._frames else frame

    def _opaque_cases(self, frame: Frame) -> Iterator[OomCase]:
        """Yield the cases of programs without an agent that ended on a full device."""
        before = self._frames[-1] if self._frames else None
        for device in before.snapshot.devices if before else ():
            now = frame.snapshot.device(device.uuid)
            if (
                before is None
                or now is None
                or now.missed_readings
                or not now.up
                or now.processes is None
                or device.missed_readings
            ):
                continue
            for key, process in device.processes_by_key.items():
                if key in now.processes_by_key:
                    continue  # as nearly every process of nearly every tick
                is_gone = not frame.snapshot.may_contain(key) and key not in frame.snapshot.possibly_suspended
                if is_gone and key not in self._processes_with_agent and "holder" not in process.kinds:
                    case = case_without_agent(process, device, before, self._core.history)
                    if case is not None:
                        yield case

    def _annotate(self, alert: Alert) -> Alert:
        """Return an alert on a program that ran out of memory with its case."""
        if alert.process is None or alert.rule not in RULES_WITH_CASE:
            return alert
        case = self.cases.of_alert(alert.process, dict(alert.labels).get("uuid"))
        if case is None:
            return alert
        return replace(alert, annotations=(*alert.annotations, (CASE_ANNOTATION, case.id)))


def _age_seconds(earlier: Frame, frame: Frame) -> float:
    return frame.snapshot.elapsed_seconds - earlier.snapshot.elapsed_seconds


FLOOR_POINTS = 30
"""Number of points into which a program's history is divided, whose halves are compared; a young program has fewer."""
TIMELINE_SECONDS, TIMELINE_POINTS = 600.0, 120
"""Length of a timeline, and its number of points."""
MAX_CURVES = 12
"""Maximum number of programs with a curve of their own."""
REST_NAME = "everything else (including suspended and ended programs)"
"""The name of what is on the device besides the programs with a curve."""
NOTABLE_RATIO = 0.01
"""Part of the device's highest use from which the rest is shown: less is a difference of a moment."""
MAX_PROGRAMS = 64
"""Programs of a timeline, those that hold most: a tick reads the history of each."""
FULL_FREE_RATIO = 0.02
"""Free part of a device below which it is full."""
NEAR_PEAK_RATIO = 0.98
"""Part of its highest use that a program without an agent held when it ended."""


def recent_peaks(frame: Frame, history: History) -> Mapping[str, int]:
    """Return the maximum bytes in use on each device in the minute before a frame."""
    since = frame.snapshot.taken_at - PEAK_SECONDS
    series = {each.uuid: history.series((each.uuid, None), "used", since) for each in frame.snapshot.devices}
    return {uuid: int(max(point.high for point in points)) for uuid, points in series.items() if points}


def case_id(at: float, pid: int, number: int) -> str:
    return f"{int(at)}-{pid}-{number}"


def live_floors(history: History, key: SeriesKey) -> tuple[float, float] | None:
    """Return the minimum live bytes in the first half of a program's history and in the second; None if unknown."""
    lows = [point.low for point in history.series(key, "live", resolution=history.age_seconds(key) / FLOOR_POINTS)]
    half = len(lows) // 2
    return (min(lows[:half]), min(lows[half:])) if half else None


def case_of(evidence: Evidence, history: History) -> OomCase:
    """Return the case of an error of a program with an agent."""
    if evidence.uuid is not None:
        evidence = replace(evidence, live_floors=live_floors(history, (evidence.uuid, evidence.report.key)))
    candidates = remedies(evidence)
    report = evidence.report
    # others have freed it elsewhere
    scopes = tuple(scope for scope in evidence.oom.scopes if scope.retained_bytes <= evidence.live_bytes)
    oom = replace(evidence.oom, scopes=scopes) if evidence.pools else evidence.oom
    lines = tuple(_ledger(evidence))
    return OomCase(
        id=case_id(oom.at, report.pid, oom.number),
        at=oom.at,
        pid=report.pid,
        start_ticks=report.start_ticks,
        workload=report.workload,
        device_uuid=evidence.uuid,
        gpu="" if evidence.device is None else str(evidence.device.index),
        summary=summary_sentence(evidence, candidates),
        request_bytes=oom.request_bytes,
        free_bytes=evidence.free_bytes,
        missing_bytes=evidence.missing_bytes,
        reserved_bytes=evidence.device.reserved_bytes if evidence.device else None,
        remedies=candidates,
        uid=report.uid,
        job=report.job,
        rank=report.rank,
        oom=oom,
        lines=lines,
        lines_at=evidence.snapshot.taken_at,
        overcount_bytes=evidence.overcount_bytes,
        reported_at=None
        if evidence.earlier_report is None or evidence.pools
        else evidence.snapshot.taken_at - evidence.earlier_report.age_seconds,
        timeline=_timeline(evidence, history, lines),
        limit_bytes=evidence.limit[0] if evidence.is_limited and evidence.limit is not None else None,
    )


def _timeline(evidence: Evidence, history: History, lines: Sequence[LedgerLine]) -> Timeline:
    """Return the timeline of the device, or of what counts against the program's own limit if this is the cause."""
    if evidence.uuid is None or not evidence.is_limited:
        return Timeline() if evidence.uuid is None else timeline(history, lines, evidence.uuid, evidence.oom.at)
    signal: HistorySignal = "live" if evidence.is_arena else "held"
    points = history.series(
        (evidence.uuid, evidence.report.key), signal, evidence.oom.at - TIMELINE_SECONDS, until=evidence.oom.at
    )
    if not points or len(evidence.pools) > 1:  # the history contains all allocators of the program
        return Timeline()
    times, step_seconds = _times(points[0].at, evidence.oom.at)
    used = (*_values(points, times, step_seconds)[:-1], evidence.used_of_limit_bytes)
    curve = Curve(pid=evidence.report.pid, workload=evidence.report.workload, used_bytes=used)
    return Timeline(tuple(round(time, 1) for time in times), (curve,))


def _ledger(evidence: Evidence) -> Iterator[LedgerLine]:
    """Yield the ledger of the device: the program's own lines are those of its record, if this states its pools.

    The last lines are the bytes in use at the error that are in neither.
    """
    report = evidence.report
    if evidence.uuid is None:
        return
    freed = f"probably {report.workload or 'the program'}, freed since the error"
    unaccounted = ((freed, evidence.freed_since_bytes), ("", evidence.unaccounted_bytes - evidence.freed_since_bytes))
    rest = [
        LedgerLine(device_uuid=evidence.uuid, share="unattributed", used_bytes=size, workload=name)
        for name, size in unaccounted
        if size
    ]
    if not evidence.pools:
        yield from (*evidence.lines, *rest)
        return
    yield from (line for line in evidence.lines if line.process != report.key)
    shares: Mapping[Share, int] = {
        "live": evidence.live_bytes,
        "cached": sum(pool.cached_bytes for pool in evidence.pools),
        "stranded": sum(pool.stranded_bytes for pool in evidence.pools),
        "overhead": evidence.overhead_bytes,
    }
    for share, size in shares.items():
        yield LedgerLine(
            device_uuid=evidence.uuid,
            share=share,
            used_bytes=size,
            pid=report.pid,
            start_ticks=report.start_ticks,
            workload=report.workload,
        )
    yield from rest


def case_without_agent(process: ProcessUsage, device: DeviceReading, before: Frame, history: History) -> OomCase | None:
    """Return the case of a program without an agent that ended while its device was full; None if it was not.

    The driver does not state why a program ends: the summary says so.
    """
    free, size, used = device.current_free_bytes, device.size_bytes, process.used_bytes
    if free is None or not size or not used or free >= FULL_FREE_RATIO * size:
        return None
    at = before.snapshot.taken_at
    lines = tuple(line for line in before.ledger.lines if line.device_uuid == device.uuid)
    case_timeline = timeline(history, lines, device.uuid, at)
    curve = next((each for each in case_timeline.curves if each.pid == process.pid), None)
    highest = max((value for value in curve.used_bytes if value is not None), default=0) if curve else 0
    if used < NEAR_PEAK_RATIO * highest:
        return None
    name = f"{process.comm or 'a program'} (pid {process.pid})"
    summary = (
        f"{name} exited while it used {size_text(used)} on GPU {device.index}, which had only {size_text(free)} free: "
        "it may have run out of memory. Start it with gpumond run: next time you'll see the request, the line and the "
        "remedies"
    )
    return OomCase(
        id=case_id(at, process.pid, 0),
        at=at,
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=process.comm or "",
        device_uuid=device.uuid,
        gpu=str(device.index),
        summary=summary,
        free_bytes=free,
        reserved_bytes=device.reserved_bytes,
        remedies=_cache_remedies(before, device, process.key),
        uid=process.uid,
        lines=lines,
        lines_at=at,
        timeline=case_timeline,
    )


def _cache_remedies(before: Frame, device: DeviceReading, ended_process: ProcessKey) -> tuple[Remedy, ...]:
    snapshot = before.snapshot
    reports = [each for each in snapshot.reports_by_device.get(device.uuid, ()) if each.flush_policy != "never"]
    sizes = [(snapshot.reclaimable_from(each, device), each) for each in reports if each.key != ended_process]
    return tuple(
        Remedy(
            name="neighbor-cache",
            text=f"flush {each.workload or 'a program'} (pid {each.pid}): gpumond flush --pid {each.pid}",
            size_bytes=size,
            enough=None,
            basis="reported",
            source="this program's agent",
        )
        for size, each in sorted(sizes, key=lambda pair: -pair[0])
        if size
    )


def timeline(history: History, lines: Sequence[LedgerLine], uuid: str, at: float) -> Timeline:
    """Return the use of each program on a device in the ten minutes before ``at``, the largest first, and of the rest.

    The rest is what the driver counted besides them: also of programs that are suspended or have ended since. The last
    values are those of ``lines``, the device's ledger at that time.
    """
    since = at - TIMELINE_SECONDS
    used: Counter[ProcessKey] = Counter()
    names: dict[ProcessKey, str] = {}
    for line in lines:
        if line.process is not None:
            used[line.process] += line.used_bytes
            names[line.process] = line.workload
    device_points = history.series((uuid, None), "used", since, until=at)
    series = {key: history.series((uuid, key), "used", since, until=at) for key, _ in used.most_common(MAX_PROGRAMS)}
    begin = min((points[0].at for points in (device_points, *series.values()) if points), default=at)
    times, step_seconds = _times(begin, at)
    curves = []
    for key, points in series.items():
        if points:
            earlier = _values(points, times, step_seconds)[:-1]
            curves.append(Curve(pid=key.pid, workload=names[key], used_bytes=(*earlier, used[key])))
    curves.sort(key=lambda curve: -max((value or 0 for value in curve.used_bytes), default=0))
    curves_shown = curves[:MAX_CURVES]
    total = sum(line.used_bytes for line in lines) if lines else None
    rest = _uncovered_use((*_values(device_points, times, step_seconds)[:-1], total), curves_shown)
    if any(rest):
        curves_shown.append(Curve(pid=None, workload=REST_NAME, used_bytes=rest))
    return Timeline(tuple(round(time, 1) for time in times), tuple(curves_shown))


def _times(begin: float, at: float) -> tuple[list[float], float]:
    """Return the times of a timeline that ends at ``at``, and the seconds between them."""
    step_seconds = max(1.0, (at - begin) / TIMELINE_POINTS)
    return [begin + step_seconds * number for number in range(int((at - begin) / step_seconds) + 1)], step_seconds


def _values(points: Sequence[Point], times: Sequence[float], step_seconds: float) -> tuple[int | None, ...]:
    """Return the last value before the end of each step that begins at one of these times."""
    moments = [point.at for point in points]
    indexes = (bisect_right(moments, time + step_seconds) for time in times)
    return tuple(int(points[index - 1].median) if index else None for index in indexes)


def _uncovered_use(device_bytes: Sequence[int | None], curves: Sequence[Curve]) -> tuple[int | None, ...]:
    """Return the use of the device besides these curves.

    It is 0 where only one point before the last differs: the medians of the device and of a program are there those of
    other readings.
    """
    min_bytes = NOTABLE_RATIO * max((value or 0 for value in device_bytes), default=0)
    sums = [sum(curve.used_bytes[index] or 0 for curve in curves) for index in range(len(device_bytes))]
    rest = [
        None if total is None else max(0, total - used_by_curves)
        for total, used_by_curves in zip(device_bytes, sums, strict=True)
    ]
    notable = [False, *((value or 0) >= min_bytes > 0 for value in rest), True]
    lasting = [is_notable and (notable[index] or notable[index + 2]) for index, is_notable in enumerate(notable[1:-1])]
    return tuple(value if value is None or is_lasting else 0 for value, is_lasting in zip(rest, lasting, strict=True))
