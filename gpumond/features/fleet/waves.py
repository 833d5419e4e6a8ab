"""Which of the planned flushes are carried out, and in which order: limits of an operation, jobs and waves. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumond.features.fleet.plan import PlannedFlush, Replicas


class Unavailable(NamedTuple):
    """Replicas of a service that may be unavailable: a number, or a percentage of all, rounded down."""

    number: int
    percent: bool

    def of(self, replicas: int) -> int:
        return replicas * self.number // 100 if self.percent else self.number

    def __str__(self) -> str:
        return f"{self.number}%" if self.percent else str(self.number)


def parse_unavailable(text: str) -> Unavailable:
    """Return the limit that a text such as ``3`` or ``25%`` states. Raises ValueError."""
    digits = text.removesuffix("%")
    percent = digits != text
    if not (digits.isascii() and digits.isdecimal()) or (percent and int(digits) > 100):
        raise ValueError("expected a number of replicas or a percentage, such as 3 or 25%")
    return Unavailable(int(digits), percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``max_machines``: machines with a flush. ``keep``: replicas of each service that stay awake.
    ``max_unavailable``: its replicas that are not awake, those that were not before included. None: without a limit.
    """

    max_machines: int | None = None
    keep: int = 0
    max_unavailable: Unavailable | None = None


def limited(
    planned: Iterable[PlannedFlush], limits: Limits, services: Mapping[str, Replicas] | None = None
) -> list[PlannedFlush]:
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
    reason = f"it is beyond the limit of machines (--max-machines {limits.max_machines})"
    return [replace(each, refusal=reason) if not each.refusal and job_of(each) in beyond else each for each in found]


def _with_replicas(
    planned: Iterable[PlannedFlush], limits: Limits, services: Mapping[str, Replicas]
) -> list[PlannedFlush]:
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


def _of_replicas(total: int, awake: int, limits: Limits) -> str:
    """Return the reason why no more replicas of a service may sleep, or an empty string."""
    if awake <= limits.keep:
        last = "the last replica" if awake == 1 else f"one of the last {awake} replicas"
        return f"it is {last} awake (--keep {limits.keep})" if awake else f"no replica is awake (--keep {limits.keep})"
    down = total - awake + 1
    if limits.max_unavailable is not None and down > limits.max_unavailable.of(total):
        return f"{down} of {total} replicas would be unavailable (--max-unavailable {limits.max_unavailable})"
    return ""


def job_of(planned: PlannedFlush) -> Hashable:
    """Return the identity of the job to which a process belongs, on all machines.

    Ranks whose launcher names no job are one job if their workload, user and number are the same. Other processes, and
    engines, are independent.
    """
    if planned.engine or not (planned.job or planned.ranks > 1):
        return planned.machine.url, planned.pid, planned.engine
    return planned.user, planned.job or (planned.workload, planned.ranks)


def jobs(planned: Iterable[PlannedFlush]) -> list[list[PlannedFlush]]:
    """Return the flushes by job, in the order of their first process."""
    groups: dict[Hashable, list[PlannedFlush]] = {}
    for each in planned:
        groups.setdefault(job_of(each), []).append(each)
    return [*groups.values()]


def waves(planned: Iterable[PlannedFlush], max_parallel: int, canary: bool = False) -> list[list[PlannedFlush]]:
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


def with_canary(order: Sequence[Sequence[PlannedFlush]]) -> list[Sequence[PlannedFlush]]:
    """Return the waves with the first one divided, if it contains several jobs: one job, then the others."""
    groups = jobs(order[0]) if order else []
    if len(groups) < 2:
        return [*order]
    first = groups.pop(_canary(groups))
    return [first, [each for own in groups for each in own], *order[1:]]


def _canary(groups: Sequence[Sequence[PlannedFlush]]) -> int:
    """Return the place of the first job whose flush would release memory, which proves most; else that of the first."""
    return next((place for place, own in enumerate(groups) if any(each.likely_bytes for each in own)), 0)
