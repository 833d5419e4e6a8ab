"""Programs and serving engines that a command of ``gpumond fleet`` selects on the frame of a machine, the bytes that a
flush would release, and the order of the flushes: limits of an operation, jobs and waves. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gpumond.facts.engines import NOT_READ
from gpumond.facts.program import TICKS_PER_SECOND
from gpumond.facts.units import plural, size_text
from gpumond.features.fleet.connection import Machine
from gpumond.features.fleet.discovery import QueriedProcess
from gpumond.view.frame import frame_of

ProcessIdentity = tuple[int, int | None]
"""Pid and start of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """A process must match each pattern, such as ``train-*``, that is not None. An engine is named by ``engine``, and
    has the workload and the users of its processes; ``workload`` may also be its name.

    With ``engines_only``, engines are selected instead of processes; with ``wake``, those to wake. What would
    release fewer than ``min_reclaimable_bytes`` is not flushed.
    """

    workload: str | None = None
    user: str | None = None
    engine: str | None = None
    engines_only: bool = False
    wake: bool = False
    min_reclaimable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFlush:
    """One process, or one serving engine, and the bytes that a flush would release. With a ``refusal``, the reason, it
    is not flushed.

    ``start_ticks`` is None only with a refusal. ``engine`` is the name of an engine, which is also its ``workload``;
    ``pid`` is then that of its first process, 0 without one. ``job`` and ``ranks``: those that the agent reports.
    """

    machine: Machine = field(repr=False)
    pid: int
    start_ticks: int | None = None
    workload: str = ""
    user: str = ""
    engine: str = ""
    job: str = ""
    ranks: int = 1
    low_bytes: int = 0
    likely_bytes: int | None = 0
    high_bytes: int = 0
    refusal: str = ""


def plan_flushes(
    machine: Machine, answer: object, criteria: Criteria, queried: Mapping[int, QueriedProcess] | None
) -> list[PlannedFlush]:
    """Return what matches on a machine. Raises DaemonError if ``answer`` is not a frame.

    ``queried``: the processes that a query names; None without a query.
    """
    frame = frame_of(answer)
    processes: dict[int, _Process] = {}
    for each in _processes(frame):
        if each.report or each.pid not in processes:
            processes[each.pid] = each
    if criteria.engines_only:
        return [*_plan_engines(machine, frame["snapshot"]["engines"], processes, criteria, queried)]
    return [*_plan_processes(machine, processes, criteria, queried)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """``used_bytes``: on all devices, as far as the driver counts it."""

    pid: int
    start_ticks: int | None
    started_at: float | None
    user: str
    uuids: frozenset[str]
    used_bytes: int
    report: Mapping[str, Any] | None

    @property
    def workload(self) -> str:
        return str(self.report["workload"]) if self.report else ""


def _plan_processes(
    machine: Machine,
    processes: Mapping[int, _Process],
    criteria: Criteria,
    queried: Mapping[int, QueriedProcess] | None,
) -> Iterator[PlannedFlush]:
    for pid in sorted(processes if queried is None else queried):
        process = processes.get(pid)
        if process is None:
            yield PlannedFlush(machine=machine, pid=pid, refusal="the process has exited")
        elif queried is None and not process.uuids:
            continue  # a launcher, which uses no device
        elif _matches((process.workload,), criteria.workload) and _matches((process.user,), criteria.user):
            yield _plan_process(machine, process, criteria, queried[pid] if queried is not None else None)


def _matches(texts: Iterable[str], pattern: str | None) -> bool:
    return pattern is None or any(fnmatchcase(text, pattern) for text in texts)


def _plan_process(
    machine: Machine, process: _Process, criteria: Criteria, queried: QueriedProcess | None
) -> PlannedFlush:
    pools = process.report["pools"] if process.report else []
    low, likely, high = (sum(int(pool["reclaimable"][name]) for pool in pools) for name in ("low", "likely", "high"))
    return PlannedFlush(
        machine=machine,
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=process.workload,
        user=process.user,
        job=str(process.report["job"]) if process.report else "",
        ranks=(process.report["world_size"] or 1) if process.report else 1,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        refusal=_process_refusal(process, likely, criteria, queried),
    )


def _process_refusal(process: _Process, likely_bytes: int, criteria: Criteria, queried: QueriedProcess | None) -> str:
    """Return the reason for which a process is not flushed, or an empty string."""
    if queried is not None and (mismatch := _identity_mismatch(process, queried)):
        return mismatch
    if process.report is None:
        return "the process has no agent"
    if process.start_ticks is None:
        return "the process's start time is unknown"
    if process.report["flush_policy"] == "never":
        return "the program doesn't allow flushes"
    return _below_minimum(likely_bytes, criteria)


def _below_minimum(available_bytes: int, criteria: Criteria, state: str = "reclaimable") -> str:
    if available_bytes >= criteria.min_reclaimable_bytes:
        return ""
    minimum = size_text(criteria.min_reclaimable_bytes)
    return f"{size_text(available_bytes)} is {state}, less than the requested minimum of {minimum}"


def _identity_mismatch(process: _Process, queried: QueriedProcess) -> str:
    """Return the reason why a process is, or may be, another one than the query names."""
    if process.started_at is None:
        return "the process's start time is unknown, so it may not be the one in the query's result"
    if process.started_at > queried.ran_at:
        return "the pid was reused: the process started after the query's data"
    if queried.workloads and process.workload not in queried.workloads:
        return f"the workload is {process.workload or 'unknown'}, not {', '.join(sorted(queried.workloads))}"
    if queried.uuids and not queried.uuids & process.uuids:
        return f"the process doesn't use {', '.join(sorted(queried.uuids))}"
    return ""


def _plan_engines(
    machine: Machine,
    engines: Iterable[Mapping[str, Any]],
    processes: Mapping[int, _Process],
    criteria: Criteria,
    queried: Mapping[int, QueriedProcess] | None,
) -> Iterator[PlannedFlush]:
    unmatched_pids = set(queried or ())
    for engine in engines:
        name = str(engine["name"])
        keys = {(each["pid"], each["start_ticks"]) for each in engine["processes"]}
        engine_processes = [processes[pid] for pid in sorted(processes) if (pid, processes[pid].start_ticks) in keys]
        selected = engine_processes if queried is None else [each for each in engine_processes if each.pid in queried]
        unmatched_pids -= {each.pid for each in engine_processes}
        workloads = (name, *(each.workload for each in engine_processes))
        matches = (
            _matches((name,), criteria.engine)
            and _matches(workloads, criteria.workload)
            and _matches((each.user for each in engine_processes), criteria.user)
        )
        if not matches or (queried is not None and not selected):
            continue
        mismatches = [] if queried is None else [_identity_mismatch(each, queried[each.pid]) for each in selected]
        used_bytes = 0 if criteria.wake else sum(each.used_bytes for each in engine_processes)
        process = engine_processes[0] if engine_processes else None
        yield PlannedFlush(
            machine=machine,
            pid=process.pid if process else 0,
            start_ticks=process.start_ticks if process else None,
            workload=name,
            user=process.user if process else "",
            engine=name,
            likely_bytes=None,
            high_bytes=used_bytes,
            refusal=next(filter(None, mismatches), "")
            or _engine_refusal(engine, process is not None, used_bytes, criteria),
        )
    for pid in sorted(unmatched_pids):
        reason = "the process belongs to no configured serving engine" if pid in processes else "the process has exited"
        yield PlannedFlush(machine=machine, pid=pid, refusal=reason)


def _engine_refusal(engine: Mapping[str, Any], has_processes: bool, used_bytes: int, criteria: Criteria) -> str:
    """Return the reason for which an engine is not flushed or woken, or an empty string. The daemon checks more."""
    if not engine["up"]:
        if engine["problem"] == NOT_READ:
            return "the daemon hasn't read the engine yet; try again in 10 s"
        return f"the engine doesn't respond: {engine['problem']}"
    if criteria.wake:
        return "the engine isn't sleeping" if engine["sleeping"] is False and not engine.get("paused") else ""
    if not engine["methods"]:
        return "the configuration doesn't allow this; add allow: [engine]"
    if engine["sleeping"]:
        return "the engine is already sleeping"
    active = (engine["running"] or 0) + (engine["waiting"] or 0)
    if active:
        return f"the engine has {plural(active, 'running or waiting request')}"
    if not has_processes:
        return str(engine["processes_problem"]) or "the engine has no process on a GPU"
    return _below_minimum(used_bytes, criteria, "in use")


class Replicas(NamedTuple):
    """Engines of one name, on all machines that were read. ``awake``: those that answer and can serve a request."""

    total: int
    awake: int


def engine_availability(answer: object) -> list[tuple[str, bool]]:
    """Return each serving engine of a machine by its name, and whether it can serve a request. Raises DaemonError."""
    engines = frame_of(answer)["snapshot"]["engines"]
    return [(str(each["name"]), bool(each["up"] and not each["sleeping"] and not each["paused"])) for each in engines]


def replicas_by_service(engines: Iterable[tuple[str, bool]]) -> Mapping[str, Replicas]:
    """Return the replicas of each service. The engines with one name are replicas of one service."""
    replicas: dict[str, Replicas] = {}
    for name, is_awake in engines:
        total, awake = replicas.get(name, Replicas(0, 0))
        replicas[name] = Replicas(total + 1, awake + is_awake)
    return replicas


def _processes(frame: Mapping[str, Any]) -> Iterator[_Process]:
    """Yield each process that uses a device or has an agent, once."""
    snapshot = frame["snapshot"]
    uptime = snapshot["uptime_seconds"]
    booted_at = None if uptime is None else float(snapshot["taken_at"]) - float(uptime)
    reports: dict[ProcessIdentity, Any] = {
        (report["pid"], report["start_ticks"]): report for report in snapshot["reports"]
    }
    users: dict[ProcessIdentity, str] = {}
    used_bytes: dict[ProcessIdentity, int] = {}
    uuids: dict[ProcessIdentity, set[str]] = {key: set() for key in reports}
    for each in frame["processes"]:
        key = (int(each["pid"]), each["start_ticks"])
        uuids.setdefault(key, set()).add(str(each["device_uuid"]))
        users[key] = users.get(key) or str(each["user"] or ("" if each["uid"] is None else each["uid"]))
        used_bytes[key] = used_bytes.get(key, 0) + (each["used_bytes"] or 0)
    for key, report in reports.items():
        uuids[key] |= {str(pool["device_uuid"]) for pool in report["pools"]}
        users[key] = users.get(key) or str(report["uid"])
    for key, process_uuids in uuids.items():
        pid, start_ticks = key
        yield _Process(
            pid=pid,
            start_ticks=start_ticks,
            started_at=None if start_ticks is None or booted_at is None else booted_at + start_ticks / TICKS_PER_SECOND,
            user=users[key],
            uuids=frozenset(process_uuids),
            used_bytes=used_bytes.get(key, 0),
            report=reports.get(key),
        )


class MaxUnavailable(NamedTuple):
    """Replicas of a service that may be unavailable: a number, or a percentage of all, rounded down."""

    number: int
    percent: bool

    def of(self, replicas: int) -> int:
        return replicas * self.number // 100 if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number}%" if self.percent else str(self.number)


def parse_max_unavailable(text: str) -> MaxUnavailable:
    """Return the limit that a text such as ``3`` or ``25%`` states. Raises ValueError."""
    digits = text.removesuffix("%")
    percent = digits != text
    if not (digits.isascii() and digits.isdecimal()) or (percent and int(digits) > 100):
        raise ValueError("expected a number of replicas or a percentage, such as 3 or 25%")
    return MaxUnavailable(int(digits), percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """``max_machines``: machines with a flush. ``keep``: replicas of each service that stay awake.
    ``max_unavailable``: its replicas that are not awake, those that were not before included. None: without a limit.
    """

    max_machines: int | None = None
    keep: int = 0
    max_unavailable: MaxUnavailable | None = None


def refuse_beyond_limits(
    planned: Iterable[PlannedFlush], limits: FleetLimits, services: Mapping[str, Replicas] | None = None
) -> list[PlannedFlush]:
    """Return the same flushes in their order, with a refusal for those beyond the limits. A job is refused as a whole.

    ``services``: the replicas of the services whose engines are put to sleep; none for other flushes.
    """
    flushes = [*planned] if services is None else _refuse_beyond_replicas(planned, limits, services)
    if limits.max_machines is None:
        return flushes
    machines: set[str] = set()
    jobs_beyond: set[Hashable] = set()
    for job in group_by_job(each for each in flushes if not each.refusal):
        with_its_machines = machines | {each.machine.url for each in job}
        if len(with_its_machines) > limits.max_machines:
            jobs_beyond.add(job_key(job[0]))
        else:
            machines = with_its_machines
    reason = f"beyond the limit of machines (--max-machines {limits.max_machines})"
    return [
        replace(each, refusal=reason) if not each.refusal and job_key(each) in jobs_beyond else each for each in flushes
    ]


def _refuse_beyond_replicas(
    planned: Iterable[PlannedFlush], limits: FleetLimits, services: Mapping[str, Replicas]
) -> list[PlannedFlush]:
    put_to_sleep: Counter[str] = Counter()
    flushes = []
    for each in planned:
        if not each.refusal:
            total, awake = services.get(each.engine, Replicas(1, 1))
            refusal = _replica_refusal(total, awake - put_to_sleep[each.engine], limits)
            put_to_sleep[each.engine] += not refusal
            each = replace(each, refusal=refusal)
        flushes.append(each)
    return flushes


def _replica_refusal(total: int, awake: int, limits: FleetLimits) -> str:
    """Return the reason why no more replicas of a service may sleep, or an empty string."""
    if awake <= limits.keep:
        replica_text = "the last replica" if awake == 1 else f"one of the last {awake} replicas"
        return (
            f"the engine is {replica_text} awake (--keep {limits.keep})"
            if awake
            else f"no replica is awake (--keep {limits.keep})"
        )
    unavailable = total - awake + 1
    if limits.max_unavailable is not None and unavailable > limits.max_unavailable.of(total):
        return f"{unavailable} of {total} replicas would be unavailable (--max-unavailable {limits.max_unavailable})"
    return ""


def job_key(planned: PlannedFlush) -> Hashable:
    """Return the identity of the job to which a process belongs, on all machines.

    Ranks whose launcher names no job are one job if their workload, user and number are the same. Other processes, and
    engines, are independent.
    """
    if planned.engine or not (planned.job or planned.ranks > 1):
        return planned.machine.url, planned.pid, planned.engine
    return planned.user, planned.job or (planned.workload, planned.ranks)


def group_by_job(planned: Iterable[PlannedFlush]) -> list[list[PlannedFlush]]:
    """Return the flushes by job, in the order of their first process."""
    groups: dict[Hashable, list[PlannedFlush]] = {}
    for each in planned:
        groups.setdefault(job_key(each), []).append(each)
    return [*groups.values()]


def plan_waves(planned: Iterable[PlannedFlush], max_parallel: int, canary: bool = False) -> list[list[PlannedFlush]]:
    """Return the processes that are flushed in groups, one wave after the other.

    The ranks of a job are in one wave, since they wait for each other; a wave with more than ``max_parallel`` processes
    contains one job only. With ``canary``, the first wave is one job.
    """
    groups = group_by_job(planned)
    waves = [groups.pop(_canary_index(groups))] if canary and groups else []
    begin = len(waves)
    for group in groups:
        if len(waves) > begin and len(waves[-1]) + len(group) <= max_parallel:
            waves[-1] += group
        else:
            waves.append(group)
    return waves


def split_canary(waves: Sequence[Sequence[PlannedFlush]]) -> list[Sequence[PlannedFlush]]:
    """Return the waves with the first one divided, if it contains several jobs: one job, then the others."""
    groups = group_by_job(waves[0]) if waves else []
    if len(groups) < 2:
        return [*waves]
    canary = groups.pop(_canary_index(groups))
    return [canary, [each for group in groups for each in group], *waves[1:]]


def _canary_index(groups: Sequence[Sequence[PlannedFlush]]) -> int:
    """Return the place of the first job whose flush would release memory, which proves most; else that of the first."""
    return next((index for index, group in enumerate(groups) if any(each.likely_bytes != 0 for each in group)), 0)
