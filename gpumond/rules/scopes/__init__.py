"""What rules look at: the subjects of each scope in one snapshot, with the values of ``values.VALUES``. Pure.

A value that is unknown is None: a rule on it then neither fires nor resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpumond.model import MISSED_LIMIT, Snapshot
from gpumond.rules import Hidden, Scope, Subjects
from gpumond.rules.recent import Recent
from gpumond.rules.scopes.daemon import daemon
from gpumond.rules.scopes.device import devices
from gpumond.rules.scopes.pool import pools
from gpumond.rules.scopes.process import processes
from gpumond.rules.scopes.seen import Seen
from gpumond.rules.scopes.workload import workloads

__all__ = ["Seen", "hidden", "subjects"]

_SCOPES: Mapping[Scope, Callable[[Seen], Subjects[Any]]] = {
    "device": devices,
    "process": processes,
    "pool": pools,
    "workload": workloads,
    "daemon": daemon,
}


def subjects(scope: Scope, seen: Seen) -> Subjects[Any]:
    return _SCOPES[scope](seen)


def hidden(snapshot: Snapshot, recent: Recent) -> Hidden:
    """Devices that did not answer, and processes that live while their agent is silent."""
    silent = recent.silent
    return Hidden(
        frozenset(device.uuid for device in snapshot.devices if device.missed >= MISSED_LIMIT),
        frozenset(str(pid) for pid, _ in silent),
        frozenset((str(uid), name) for uid, name in (recent.agents[identity] for identity in silent)),
    )
