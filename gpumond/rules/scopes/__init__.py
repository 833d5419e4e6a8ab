"""Scopes of rules, each in one file with its values, labels and placeholders. No I/O.

An unknown value is None: a rule on it neither fires nor resolves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumond.model.snapshot import MISSED_LIMIT, Snapshot
from gpumond.rules import Hidden, Scope, Subjects
from gpumond.rules.scopes.context import RuleContext, ScopeSpec
from gpumond.rules.scopes.daemon import DAEMON
from gpumond.rules.scopes.device import DEVICE
from gpumond.rules.scopes.pool import POOL
from gpumond.rules.scopes.process import PROCESS
from gpumond.rules.scopes.workload import WORKLOAD
from gpumond.rules.window import RuleWindow, unlisted

__all__ = ["SCOPES", "Existing", "RuleContext", "departure", "existing", "hidden", "subjects"]

SCOPES: Mapping[Scope, ScopeSpec[Any]] = {
    "device": DEVICE,
    "process": PROCESS,
    "pool": POOL,
    "workload": WORKLOAD,
    "daemon": DAEMON,
}


def subjects(scope: Scope, seen: RuleContext) -> Subjects[Any]:
    return SCOPES[scope].subjects(seen)


def hidden(snapshot: Snapshot, recent: RuleWindow) -> Hidden:
    """Return devices that were not read completely, processes whose agent is silent, and connected processes."""
    silent, failed = recent.silent, unlisted(snapshot)
    return Hidden(
        frozenset(each.uuid for each in snapshot.devices if each.missed >= MISSED_LIMIT or each.uuid in failed),
        frozenset(str(pid) for pid, _ in silent),
        frozenset((str(uid), name) for uid, name in (recent.agents[identity] for identity in silent)),
        frozenset(str(report.pid) for report in snapshot.reports),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Existing:
    """The subjects that a snapshot contains, as their alerts' labels name them."""

    pids: frozenset[str]
    workloads: frozenset[tuple[str, str]]
    """(uid, workload)"""
    devices: frozenset[str]


def existing(snapshot: Snapshot) -> Existing:
    listed = (str(process.pid) for device in snapshot.devices for process in device.processes or ())
    return Existing(
        pids=frozenset((*listed, *(str(report.pid) for report in snapshot.reports))),
        workloads=frozenset((str(report.uid), report.workload) for report in snapshot.reports),
        devices=frozenset(device.uuid for device in snapshot.devices),
    )


def departure(scope: Scope, labels: Mapping[str, str], subjects: Existing) -> str:
    """Return a sentence that states that the subject has ended; empty if it still exists."""
    if scope == "workload":
        name = labels.get("workload", "")
        return "" if (labels.get("uid", ""), name) in subjects.workloads else f"every program of {name} has ended"
    if scope == "device":
        exists = labels.get("uuid") in subjects.devices
        return "" if exists else f"GPU {labels.get('gpu', '')} is no longer listed by its driver"
    pid = labels.get("pid")
    return "" if not pid or pid in subjects.pids else f"process {pid} has ended"
