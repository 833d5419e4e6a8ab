"""Subjects of the rules of each scope in one snapshot, with the values of ``schema.VALUES``. No I/O.

An unknown value is None: a rule on it neither fires nor resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpumond.model.frame import Alert
from gpumond.model.snapshot import MISSED_LIMIT, Snapshot
from gpumond.rules import Hidden, Scope, Subjects
from gpumond.rules.scopes.context import RuleContext
from gpumond.rules.scopes.daemon import daemon
from gpumond.rules.scopes.device import devices
from gpumond.rules.scopes.pool import pools
from gpumond.rules.scopes.process import processes
from gpumond.rules.scopes.workload import workloads
from gpumond.rules.window import RuleWindow, unlisted

__all__ = ["RuleContext", "departure", "hidden", "subjects"]

_SCOPES: Mapping[Scope, Callable[[RuleContext], Subjects[Any]]] = {
    "device": devices,
    "process": processes,
    "pool": pools,
    "workload": workloads,
    "daemon": daemon,
}


def subjects(scope: Scope, seen: RuleContext) -> Subjects[Any]:
    return _SCOPES[scope](seen)


def hidden(snapshot: Snapshot, recent: RuleWindow) -> Hidden:
    """Return devices that were not read completely, processes whose agent is silent, and connected processes."""
    silent, failed = recent.silent, unlisted(snapshot)
    return Hidden(
        frozenset(each.uuid for each in snapshot.devices if each.missed >= MISSED_LIMIT or each.uuid in failed),
        silent,
        frozenset((str(uid), name) for uid, name in (recent.agents[process] for process in silent)),
        snapshot.reports_by_process.keys(),
    )


def departure(scope: Scope, alert: Alert, snapshot: Snapshot) -> str:
    """Return a sentence that states that the subject has ended; empty if it still exists, or may exist."""
    labels, process = dict(alert.labels), alert.process
    if scope == "workload":
        name, uid = labels.get("workload", ""), labels.get("uid", "")
        exists = any((report.workload, str(report.uid)) == (name, uid) for report in snapshot.reports)
        return "" if exists else f"every program of {name} has ended"
    if scope == "device":
        return (
            ""
            if snapshot.device(labels.get("uuid", ""))
            else f"GPU {labels.get('gpu', '')} is no longer listed by its driver"
        )
    return "" if process is None or snapshot.may_contain(process) else f"process {process.pid} has ended"
