"""Order of the flushes of several machines, and their results. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpumond.fleet.selection import PlannedFlush

Result = Literal["flushed", "refused", "failed", "skipped"]
"""``flushed``: the daemon returned receipts. ``refused``: nothing was done, for a reason of the program or the daemon.
``failed``: the daemon or the program gave no complete answer. ``skipped``: the flushes stopped before it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """Result for one process. ``wave`` counts from 1. ``receipts`` are those of its daemon."""

    planned: PlannedFlush
    result: Result
    wave: int
    reason: str = ""
    receipts: tuple[Mapping[str, Any], ...] = ()

    @property
    def released_bytes(self) -> int:
        return sum(int(receipt["released_bytes"]) for receipt in self.receipts)


def waves(planned: Iterable[PlannedFlush], max_parallel: int) -> list[list[PlannedFlush]]:
    """Return the processes that are flushed in groups, one wave after the other.

    The processes of one workload and user are in one wave, since the ranks of a job wait for each other; a wave with
    more than ``max_parallel`` processes contains one workload only. Engines and processes without a workload are
    independent.
    """
    groups: dict[tuple[object, ...], list[PlannedFlush]] = {}
    for each in planned:
        alone = (each.machine.url, each.pid, each.engine)
        together = each.workload and not each.engine
        groups.setdefault((each.workload, each.user) if together else alone, []).append(each)
    result: list[list[PlannedFlush]] = []
    for group in groups.values():
        if result and len(result[-1]) + len(group) <= max_parallel:
            result[-1] += group
        else:
            result.append([*group])
    return result


def result_of(
    planned: PlannedFlush, wave: int, receipts: Sequence[Mapping[str, Any]], reason: str = ""
) -> ProcessResult:
    """Return the result for one process from the receipts that its daemon returned."""
    outcomes = {str(receipt["outcome"]) for receipt in receipts}
    result: Result = "flushed"
    if outcomes & {"failed", "timeout"} or not outcomes:
        result, reason = "failed", reason or ("" if outcomes else "the daemon returned no receipt")
    elif outcomes <= {"refused"}:
        result = "refused"
    return ProcessResult(planned=planned, result=result, wave=wave, reason=reason, receipts=tuple(receipts))
