"""Selection of the processes that a flush on several machines concerns, from the frames of the machines. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from gpumond.errors import DaemonError
from gpumond.fleet import Machine
from gpumond.fleet.query import Named
from gpumond.fleet.status import MALFORMED
from gpumond.model.process import TICKS_PER_SECOND
from gpumond.model.units import human


@dataclass(frozen=True, slots=True)
class Criteria:
    """A process must match each that is not None. ``workload`` and ``user`` are patterns such as ``train-*``.

    Programs that would release fewer than ``min_reclaimable_bytes`` are not flushed.
    """

    workload: str | None = None
    user: str | None = None
    min_reclaimable_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFlush:
    """One process, and the bytes that a flush would release. With a ``refusal``, the reason, it is not flushed.

    ``start_ticks`` is None only with a refusal.
    """

    machine: Machine = field(repr=False)
    pid: int
    start_ticks: int | None = None
    workload: str = ""
    user: str = ""
    low_bytes: int = 0
    likely_bytes: int = 0
    high_bytes: int = 0
    refusal: str = ""


def select(machine: Machine, frame: Any, criteria: Criteria, named: Mapping[int, Named] | None) -> list[PlannedFlush]:
    """Return the processes of a machine that match. Raises DaemonError if ``frame`` is not a frame.

    ``named``: the processes that a query names; None without a query.
    """
    try:
        return [*_select(machine, frame, criteria, named)]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DaemonError(MALFORMED) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    pid: int
    start_ticks: int | None
    started_at: float | None
    user: str
    uuids: frozenset[str]
    report: Mapping[str, Any] | None

    @property
    def workload(self) -> str:
        return str(self.report["workload"]) if self.report else ""


def _select(
    machine: Machine, frame: Mapping[str, Any], criteria: Criteria, named: Mapping[int, Named] | None
) -> Iterator[PlannedFlush]:
    processes: dict[int, _Process] = {}
    for each in _processes(frame):
        if each.report or each.pid not in processes:
            processes[each.pid] = each
    for pid in sorted(processes if named is None else named):
        process = processes.get(pid)
        if process is None:
            yield PlannedFlush(machine=machine, pid=pid, refusal="the process has ended")
        elif _matches(process, criteria):
            yield _planned(machine, process, criteria, named[pid] if named is not None else None)


def _matches(process: _Process, criteria: Criteria) -> bool:
    pairs = ((criteria.workload, process.workload), (criteria.user, process.user))
    return all(pattern is None or fnmatchcase(text, pattern) for pattern, text in pairs)


def _planned(machine: Machine, process: _Process, criteria: Criteria, named: Named | None) -> PlannedFlush:
    pools = process.report["pools"] if process.report else []
    low, likely, high = (sum(int(pool["reclaimable"][name]) for pool in pools) for name in ("low", "likely", "high"))
    return PlannedFlush(
        machine=machine,
        pid=process.pid,
        start_ticks=process.start_ticks,
        workload=process.workload,
        user=process.user,
        low_bytes=low,
        likely_bytes=likely,
        high_bytes=high,
        refusal=_refusal(process, likely, criteria, named),
    )


def _refusal(process: _Process, likely_bytes: int, criteria: Criteria, named: Named | None) -> str:
    """Return the reason for which a process is not flushed, or an empty string."""
    if named is not None and (other := _other(process, named)):
        return other
    if process.report is None:
        return "it has no agent"
    if process.start_ticks is None:
        return "its start is unknown"
    if process.report["flush_policy"] == "never":
        return "its agent allows no flush"
    if likely_bytes < criteria.min_reclaimable_bytes:
        least = human(criteria.min_reclaimable_bytes)
        return f"{human(likely_bytes)} is reclaimable, less than the {least} requested"
    return ""


def _other(process: _Process, named: Named) -> str:
    """Return the reason why a process is, or may be, another one than the query names."""
    if process.started_at is None:
        return "its start is unknown, so that it may be another process than the query names"
    if process.started_at > named.ran_at:
        return "it started after the data that the query reads: the pid was reused"
    if named.workloads and process.workload not in named.workloads:
        return f"its workload is {process.workload or 'unknown'}, not {', '.join(sorted(named.workloads))}"
    if named.uuids and not named.uuids & process.uuids:
        return f"it does not use {', '.join(sorted(named.uuids))}"
    return ""


def _processes(frame: Mapping[str, Any]) -> Iterator[_Process]:
    """Yield each process that uses a device or has an agent, once."""
    snapshot = frame["snapshot"]
    uptime = snapshot["uptime_seconds"]
    boot = None if uptime is None else float(snapshot["taken_at"]) - float(uptime)
    reports = {(report["pid"], report["start_ticks"]): report for report in snapshot["reports"]}
    users: dict[tuple[int, int | None], str] = {}
    uuids: dict[tuple[int, int | None], set[str]] = {key: set() for key in reports}
    for each in frame["processes"]:
        key = (int(each["pid"]), each["start_ticks"])
        uuids.setdefault(key, set()).add(str(each["device_uuid"]))
        users[key] = users.get(key) or str(each["user"] or ("" if each["uid"] is None else each["uid"]))
    for key, report in reports.items():
        uuids[key] |= {str(pool["device_uuid"]) for pool in report["pools"]}
        users[key] = users.get(key) or str(report["uid"])
    for (pid, start_ticks), own in uuids.items():
        yield _Process(
            pid=pid,
            start_ticks=start_ticks,
            started_at=None if start_ticks is None or boot is None else boot + start_ticks / TICKS_PER_SECOND,
            user=users[pid, start_ticks],
            uuids=frozenset(own),
            report=reports.get((pid, start_ticks)),
        )
