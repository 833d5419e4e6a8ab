"""Rules on workloads: all programs of one user and one name. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from gpumond.model.claims import outermost
from gpumond.rules import Subjects
from gpumond.rules.scopes.context import RuleContext, size
from gpumond.rules.window import Workload


class _Workload(NamedTuple):
    workload: Workload
    sums: Mapping[str, int]
    known: bool


def workloads(seen: RuleContext) -> Subjects[_Workload]:
    snapshot, recent = seen.snapshot, seen.recent
    partly = {recent.agents[identity] for identity in recent.silent}
    named: defaultdict[Workload, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_SUMS, 0))
    for report in snapshot.reports:
        if report.workload:
            sums = named[Workload(report.uid, report.workload)]
            for pool in outermost(report.pools):
                sums["live_bytes"] += pool.live_bytes
                sums["held_bytes"] += pool.held_bytes
                sums["reclaimable_bytes"] += pool.reclaimable.likely
                sums["stranded_bytes"] += pool.stranded_bytes
    return Subjects(
        rows=[_Workload(workload, sums, workload not in partly) for workload, sums in named.items()],
        values={name: partial(_sum, name) for name in _SUMS},
        labels=lambda row: (("uid", str(row.workload.uid)), ("workload", row.workload.name)),
        texts=_workload_texts,
    )


_SUMS = ("live_bytes", "held_bytes", "reclaimable_bytes", "stranded_bytes")


def _sum(name: str, row: _Workload) -> float | None:
    return float(row.sums[name]) if row.known else None


def _workload_texts(row: _Workload) -> dict[str, str]:
    sums = {name.removesuffix("_bytes"): size(value) for name, value in row.sums.items()}
    return {"uid": str(row.workload.uid), "workload": row.workload.name, **sums}
