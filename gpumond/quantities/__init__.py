"""Scopes of rules, with their values, labels and placeholders; that of gpumond itself is here. No I/O.

An unknown value is None: a rule on it neither fires nor resolves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpumond.facts.alerts import RuleScope
from gpumond.facts.frame import Alert
from gpumond.facts.snapshot import MAX_MISSED_READINGS, Snapshot
from gpumond.quantities.device_quantities import DRIVER_RESPONSIVE, DRIVER_UP, STORE_WRITABLE
from gpumond.quantities.device_scope import DEVICE_SCOPE
from gpumond.quantities.engine_scope import ENGINE_SCOPE
from gpumond.quantities.pool_scope import POOL_SCOPE
from gpumond.quantities.process_scope import PROCESS_SCOPE, WORKLOAD_SCOPE
from gpumond.quantities.quantity import Quantity
from gpumond.quantities.scope import RuleContext, ScopeSpec, Subjects, UnreadableSubjects
from gpumond.quantities.window import RuleWindow, unlisted_devices


def daemon_rows(context: RuleContext) -> Sequence[Snapshot]:
    return (context.snapshot,)


DAEMON_SCOPE = ScopeSpec(
    rows=daemon_rows,
    quantities=(
        DRIVER_UP,
        DRIVER_RESPONSIVE,
        Quantity("agents", "number of programs with an agent", lambda row: float(len(row.reports))),
        STORE_WRITABLE,
        Quantity(
            "devices",
            "number of devices that the driver lists; unknown while it can't be read",
            lambda row: float(len(row.devices)) if row.source.up else None,
        ),
        Quantity("engines", "number of configured serving engines", lambda row: float(len(row.engines))),
        Quantity("faults", "number of faults, such as values that can't be read", lambda row: float(len(row.faults))),
    ),
    label_meanings={},
    labels_of=lambda row: (),
    placeholders={"reason": ("why the driver can't be read", lambda row: row.source.detail or row.source.reason)},
)


__all__ = ["SCOPES", "RuleContext", "ending_sentence", "subjects", "unreadable_subjects"]

SCOPES: Mapping[RuleScope, ScopeSpec[Any]] = {
    "device": DEVICE_SCOPE,
    "process": PROCESS_SCOPE,
    "pool": POOL_SCOPE,
    "workload": WORKLOAD_SCOPE,
    "engine": ENGINE_SCOPE,
    "daemon": DAEMON_SCOPE,
}


def subjects(scope: RuleScope, context: RuleContext) -> Subjects[Any]:
    return SCOPES[scope].subjects(context)


def unreadable_subjects(snapshot: Snapshot, window: RuleWindow) -> UnreadableSubjects:
    """Return devices that were not read completely, processes whose agent is silent or that may be suspended, connected
    processes, and suspended ones.
    """
    unresponsive, unlisted = snapshot.unresponsive, unlisted_devices(snapshot)
    silent = window.silent_processes - unresponsive
    return UnreadableSubjects(
        frozenset(
            each.uuid
            for each in snapshot.devices
            if each.missed_readings >= MAX_MISSED_READINGS or each.uuid in unlisted
        ),
        silent | (snapshot.possibly_suspended - unresponsive),
        frozenset((str(uid), name) for uid, name in (window.workload_by_process[process] for process in silent)),
        snapshot.reports_by_process.keys() - unresponsive if unresponsive else snapshot.reports_by_process.keys(),
        unresponsive,
    )


def ending_sentence(scope: RuleScope, alert: Alert, snapshot: Snapshot) -> str:
    """Return a sentence that states that the subject has ended or is suspended; empty if it exists, or may exist."""
    labels, process = dict(alert.labels), alert.process
    if scope == "workload":
        name, uid = labels.get("workload", ""), labels.get("uid", "")
        exists = any((report.workload, str(report.uid)) == (name, uid) for report in snapshot.reports)
        return "" if exists else f"every program of {name} has exited"
    if scope == "engine":
        name, kind = labels.get("engine", ""), labels.get("kind", "")
        exists = any((engine.name, engine.kind) == (name, kind) for engine in snapshot.engines)
        return "" if exists else f"engine {name} ({kind}) is no longer configured"
    if scope == "device":
        exists = snapshot.device(labels.get("uuid", "")) is not None
        return "" if exists else f"GPU {labels.get('gpu', '')} is no longer listed by its driver"
    if process in snapshot.unresponsive:
        return f"process {alert.pid} is suspended"
    return "" if process is None or snapshot.may_contain(process) else f"process {process.pid} has exited"
