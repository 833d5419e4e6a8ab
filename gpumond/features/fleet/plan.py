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

Key = tuple[int, int | None]
"""Pid and start of a process."""
UNREAD = "the daemon hasn't read the engine yet; try again in 10 s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """A process must match each pattern, such as ``train-*``, that is not None. An engine is named by ``engine``, and
    has the workload and the users of its processes; ``workload`` may also be its name.

    With ``engines``, engines are selected instead of processes; with ``wake``, those to wake. What would release fewer
    than ``min_reclaimable_bytes`` is not flushed.
    """

    workload: str | None = None
    user: str | None = None
    engine: str | None = None
    engines: bool = False
    wake: bool = False
    min_reclaimable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlush:
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


def select(
    machine: Machine, answer: object, criteria: Criteria, named: Mapping[int, QueriedProcess] | None
) -> list[MachineFlush]:
    """Return what matches on a machine. Raises DaemonError if ``answer`` is not a frame.

    ``named``: the processes that a query names; None without a query.
    """
    frame = frame_of(answer)
    processes: dict[int, _Process] = {}
    for each in _processes(frame):
        if each.report or each.pid not in processes:
            processes[each.pid] = each
    if criteria.engines:
        return [*_select_engines(machine, frame["snapshot"]["engines"], processes, criteria, named)]
    return [*_select(machine, processes, criteria, named)]


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


def _select(
    machine: Machine, processes: Mapping[int, _Process], criteria: Criteria, named: Mapping[int, QueriedProcess] | None
) -> Iterator[MachineFlush]:
    for pid in sorted(processes if named is None else named):
        process = processes.get(pid)
        if process is None:
            yield MachineFlush(machine=machine, pid=pid, refusal="the process has exited")
        elif named is None and not process.uuids:
            continue  # a launcher, which uses no device
        elif _matches((process.workload,), criteria.workload) and _matches((process.user,), criteria.user):
            yield _planned(machine, process, criteria, named[pid] if named is not None else None)


def _matches(texts: Iterable[str], pattern: str | None) -> bool:
    return pattern is None or any(fnmatchcase(text, pattern) for text in texts)


def _planned(machine: Machine, process: _Process, criteria: Criteria, named: QueriedProcess | None) -> MachineFlush:
    pools = process.report["pools"] if process.report else []
    low, likely, high = (sum(int(pool["reclaimable"][name]) for pool in pools) for name in ("low", "likely", "high"))
    return MachineFlush(
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
        refusal=_refusal(process, likely, criteria, named),
    )


def _refusal(process: _Process, likely_bytes: int, criteria: Criteria, named: QueriedProcess | None) -> str:
    """Return the reason for which a process is not flushed, or an empty string."""
    if named is not None and (other := _other(process, named)):
        return other
    if process.report is None:
        return "the process has no agent"
    if process.start_ticks is None:
        return "the process's start time is unknown"
    if process.report["flush_policy"] == "never":
        return "the program doesn't allow flushes"
    return _too_few(likely_bytes, criteria)


def _too_few(found_bytes: int, criteria: Criteria, what: str = "reclaimable") -> str:
    if found_bytes >= criteria.min_reclaimable_bytes:
        return ""
    least = size_text(criteria.min_reclaimable_bytes)
    return f"{size_text(found_bytes)} is {what}, less than the requested minimum of {least}"


def _other(process: _Process, named: QueriedProcess) -> str:
    """Return the reason why a process is, or may be, another one than the query names."""
    if process.started_at is None:
        return "the process's start time is unknown, so it may not be the one in the query's result"
    if process.started_at > named.ran_at:
        return "the pid was reused: the process started after the query's data"
    if named.workloads and process.workload not in named.workloads:
        return f"the workload is {process.workload or 'unknown'}, not {', '.join(sorted(named.workloads))}"
    if named.uuids and not named.uuids & process.uuids:
        return f"the process doesn't use {', '.join(sorted(named.uuids))}"
    return ""


def _select_engines(
    machine: Machine,
    engines: Iterable[Mapping[str, Any]],
    processes: Mapping[int, _Process],
    criteria: Criteria,
    named: Mapping[int, QueriedProcess] | None,
) -> Iterator[MachineFlush]:
    rest = set(named or ())
    for engine in engines:
        name = str(engine["name"])
        keys = {(each["pid"], each["start_ticks"]) for each in engine["processes"]}
        own = [processes[pid] for pid in sorted(processes) if (pid, processes[pid].start_ticks) in keys]
        meant = own if named is None else [each for each in own if each.pid in named]
        rest -= {each.pid for each in own}
        workloads, users = (name, *(each.workload for each in own)), [each.user for each in own]
        chosen = _matches((name,), criteria.engine) and _matches(workloads, criteria.workload)
        if not chosen or not _matches(users, criteria.user) or (named is not None and not meant):
            continue
        others = [] if named is None else [_other(each, named[each.pid]) for each in meant]
        used = 0 if criteria.wake else sum(each.used_bytes for each in own)
        yield MachineFlush(
            machine=machine,
            pid=own[0].pid if own else 0,
            start_ticks=own[0].start_ticks if own else None,
            workload=name,
            user=own[0].user if own else "",
            engine=name,
            likely_bytes=None,
            high_bytes=used,
            refusal=next(filter(None, others), "") or _engine_refusal(engine, bool(own), used, criteria),
        )
    for pid in sorted(rest):
        reason = "the process belongs to no configured serving engine" if pid in processes else "the process has exited"
        yield MachineFlush(machine=machine, pid=pid, refusal=reason)


def _engine_refusal(engine: Mapping[str, Any], has_processes: bool, used_bytes: int, criteria: Criteria) -> str:
    """Return the reason for which an engine is not flushed or woken, or an empty string. The daemon checks more."""
    if not engine["up"]:
        unread = engine["problem"] == NOT_READ
        return UNREAD if unread else f"the engine doesn't respond: {engine['problem']}"
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
    return _too_few(used_bytes, criteria, "in use")


class Replicas(NamedTuple):
    """Engines of one name, on all machines that were read. ``awake``: those that answer and can serve a request."""

    total: int
    awake: int


def engine_availability(answer: object) -> list[tuple[str, bool]]:
    """Return each serving engine of a machine by its name, and whether it can serve a request. Raises DaemonError."""
    engines = frame_of(answer)["snapshot"]["engines"]
    return [(str(each["name"]), bool(each["up"] and not each["sleeping"] and not each["paused"])) for each in engines]


def by_service(engines: Iterable[tuple[str, bool]]) -> Mapping[str, Replicas]:
    """Return the replicas of each service. The engines with one name are replicas of one service."""
    found: dict[str, Replicas] = {}
    for name, serves in engines:
        total, number = found.get(name, Replicas(0, 0))
        found[name] = Replicas(total + 1, number + serves)
    return found


def _processes(frame: Mapping[str, Any]) -> Iterator[_Process]:
    """Yield each process that uses a device or has an agent, once."""
    snapshot = frame["snapshot"]
    uptime = snapshot["uptime_seconds"]
    boot = None if uptime is None else float(snapshot["taken_at"]) - float(uptime)
    reports: dict[Key, Any] = {(report["pid"], report["start_ticks"]): report for report in snapshot["reports"]}
    users: dict[Key, str] = {}
    used: dict[Key, int] = {}
    uuids: dict[Key, set[str]] = {key: set() for key in reports}
    for each in frame["processes"]:
        key = (int(each["pid"]), each["start_ticks"])
        uuids.setdefault(key, set()).add(str(each["device_uuid"]))
        users[key] = users.get(key) or str(each["user"] or ("" if each["uid"] is None else each["uid"]))
        used[key] = used.get(key, 0) + (each["used_bytes"] or 0)
    for key, report in reports.items():
        uuids[key] |= {str(pool["device_uuid"]) for pool in report["pools"]}
        users[key] = users.get(key) or str(report["uid"])
    for key, own in uuids.items():
        pid, start_ticks = key
        yield _Process(
            pid=pid,
            start_ticks=start_ticks,
            started_at=None if start_ticks is None or boot is None else boot + start_ticks / TICKS_PER_SECOND,
            user=users[key],
            uuids=frozenset(own),
            used_bytes=used.get(key, 0),
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
    planned: Iterable[MachineFlush], limits: FleetLimits, services: Mapping[str, Replicas] | None = None
) -> list[MachineFlush]:
    """Return the same flushes in their order, with a refusal for those beyond the limits. A job is refused as a whole.

    ``services``: the replicas of the services whose engines are put to sleep; none for other flushes.
    """
    found = [*planned] if services is None else _with_replicas(planned, limits, services)
    if limits.max_machines is None:
        return found
    machines: set[str] = set()
    beyond: set[Hashable] = set()
    for own in jobs(each for each in found if not each.refusal):
        more = machines | {each.machine.url for each in own}
        if len(more) > limits.max_machines:
            beyond.add(job_of(own[0]))
        else:
            machines = more
    reason = f"beyond the limit of machines (--max-machines {limits.max_machines})"
    return [replace(each, refusal=reason) if not each.refusal and job_of(each) in beyond else each for each in found]


def _with_replicas(
    planned: Iterable[MachineFlush], limits: FleetLimits, services: Mapping[str, Replicas]
) -> list[MachineFlush]:
    sleeping: Counter[str] = Counter()
    found = []
    for each in planned:
        if not each.refusal:
            total, awake = services.get(each.engine, Replicas(1, 1))
            refusal = _of_replicas(total, awake - sleeping[each.engine], limits)
            sleeping[each.engine] += not refusal
            each = replace(each, refusal=refusal)
        found.append(each)
    return found


def _of_replicas(total: int, awake: int, limits: FleetLimits) -> str:
    """Return the reason why no more replicas of a service may sleep, or an empty string."""
    if awake <= limits.keep:
        last = "the last replica" if awake == 1 else f"one of the last {awake} replicas"
        return (
            f"the engine is {last} awake (--keep {limits.keep})"
            if awake
            else f"no replica is awake (--keep {limits.keep})"
        )
    down = total - awake + 1
    if limits.max_unavailable is not None and down > limits.max_unavailable.of(total):
        return f"{down} of {total} replicas would be unavailable (--max-unavailable {limits.max_unavailable})"
    return ""


def job_of(planned: MachineFlush) -> Hashable:
    """Return the identity of the job to which a process belongs, on all machines.

    Ranks whose launcher names no job are one job if their workload, user and number are the same. Other processes, and
    engines, are independent.
    """
    if planned.engine or not (planned.job or planned.ranks > 1):
        return planned.machine.url, planned.pid, planned.engine
    return planned.user, planned.job or (planned.workload, planned.ranks)


def jobs(planned: Iterable[MachineFlush]) -> list[list[MachineFlush]]:
    """Return the flushes by job, in the order of their first process."""
    groups: dict[Hashable, list[MachineFlush]] = {}
    for each in planned:
        groups.setdefault(job_of(each), []).append(each)
    return [*groups.values()]


def waves(planned: Iterable[MachineFlush], max_parallel: int, canary: bool = False) -> list[list[MachineFlush]]:
    """Return the processes that are flushed in groups, one wave after the other.

    The ranks of a job are in one wave, since they wait for each other; a wave with more than ``max_parallel`` processes
    contains one job only. With ``canary``, the first wave is one job.
    """
    groups = jobs(planned)
    result = [groups.pop(_canary(groups))] if canary and groups else []
    first = len(result)
    for group in groups:
        if len(result) > first and len(result[-1]) + len(group) <= max_parallel:
            result[-1] += group
        else:
            result.append(group)
    return result


def with_canary(order: Sequence[Sequence[MachineFlush]]) -> list[Sequence[MachineFlush]]:
    """Return the waves with the first one divided, if it contains several jobs: one job, then the others."""
    groups = jobs(order[0]) if order else []
    if len(groups) < 2:
        return [*order]
    first = groups.pop(_canary(groups))
    return [first, [each for own in groups for each in own], *order[1:]]


def _canary(groups: Sequence[Sequence[MachineFlush]]) -> int:
    """Return the place of the first job whose flush would release memory, which proves most; else that of the first."""
    return next((place for place, own in enumerate(groups) if any(each.likely_bytes != 0 for each in own)), 0)
