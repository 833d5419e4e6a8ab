"""Rules on workloads: all programs of one user and one name. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumond.quantities.scope import RuleContext, ScopeSpec, size
from gpumond.quantities.table import HELD, LIVE, RECLAIMABLE, STRANDED, Quantity, number
from gpumond.quantities.window import Workload
from gpumond.tick.claims import outermost


class _Workload(NamedTuple):
    workload: Workload
    sums: Mapping[str, int | None]
    programs: int
    known: bool


def workloads(context: RuleContext) -> Sequence[_Workload]:
    snapshot, recent = context.snapshot, context.recent
    partly = {recent.agents[identity] for identity in recent.silent}
    named: defaultdict[Workload, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys((quantity.name for quantity in _SUMMED), 0)
    )
    uncounted: set[Workload] = set()
    programs = Counter(Workload(report.uid, report.workload) for report in snapshot.reports)
    for report in snapshot.reports:
        if report.workload:
            workload = Workload(report.uid, report.workload)
            sums = named[workload]
            for pool in outermost(report.pools):
                if pool.live_bytes is None:
                    uncounted.add(workload)
                sums["live_bytes"] += pool.live_bytes or 0
                sums["held_bytes"] += pool.held_bytes
                sums["reclaimable_bytes"] += pool.reclaimable.likely
                sums["stranded_bytes"] += pool.stranded_bytes
    return [
        _Workload(
            workload,
            {**sums, "live_bytes": None, "stranded_bytes": None} if workload in uncounted else sums,
            programs[workload],
            workload not in partly,
        )
        for workload, sums in named.items()
    ]


_SUMMED = (LIVE, HELD, RECLAIMABLE, STRANDED)


def _sum(name: str) -> Quantity[_Workload]:
    meaning = f"`{name}` of the pools of its programs, summed."
    return Quantity(name, "bytes", meaning, lambda row: number(row.sums[name]) if row.known else None)


def _workload_texts(row: _Workload) -> dict[str, str]:
    sums = {name.removesuffix("_bytes"): size(value) for name, value in row.sums.items()}
    return {"uid": str(row.workload.uid), "workload": row.workload.name, **sums}


WORKLOAD = ScopeSpec(
    rows=workloads,
    values=(
        *(_sum(quantity.name) for quantity in _SUMMED),
        Quantity(
            "programs",
            "count",
            "its programs with an agent that reports",
            lambda row: float(row.programs) if row.known else None,
        ),
    ),
    labels={"uid": "uid of the user", "workload": "name of the workload"},
    labels_of=lambda row: (("uid", str(row.workload.uid)), ("workload", row.workload.name)),
    placeholders={
        "uid": "uid of the user",
        "workload": "name of the workload",
        "live": "allocated to its programs",
        "held": "held by the pools of its programs",
        "reclaimable": "bytes that a flush of them would release",
        "stranded": "held and free, but not released by a flush",
    },
    texts=_workload_texts,
)
