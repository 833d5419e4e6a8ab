"""The case file of one out-of-memory error. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.facts.frame import Line
from gpumond.facts.program import Oom, ProcessKey

Basis = Literal["measured", "reported", "estimate"]
"""Source of a remedy's bytes: the driver or the program's own counters, an agent's statement about a possible flush, or
an estimate.
"""

RANK_SECONDS = 60.0
"""Errors of the ranks of one job within this time belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change, and the bytes that it makes available on the device; None if they are unknown.

    ``enough``: the change alone would have been enough; None if unknown. ``source``: how the bytes are known.
    """

    name: str
    text: str
    size_bytes: int | None
    enough: bool | None
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes of one program, or of several others (``pid`` None), at the times of the timeline; unknown is None."""

    pid: int | None
    workload: str
    used_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """All programs of a device in the ten minutes before an error; ``at`` are unix times."""

    at: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """What is known about one out-of-memory error, and the remedies, most effective first.

    ``summary`` is one sentence. ``oom`` is the program's record; None for a program without an agent, of which only
    the driver's numbers are known. ``missing_bytes``: what the request lacked. ``lines`` are the ledger of the device
    at the last tick before the error.
    """

    id: str
    at: float
    pid: int
    start_ticks: int | None
    workload: str
    device_uuid: str | None
    gpu: str
    summary: str
    request_bytes: int | None = None
    free_bytes: int | None = None
    missing_bytes: int | None = None
    remedies: tuple[Remedy, ...] = ()
    uid: int | None = None
    job: str = ""
    rank: int | None = None
    oom: Oom | None = None
    lines: tuple[Line, ...] = ()
    timeline: Timeline = Timeline()

    @property
    def process(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """A case file in a list. ``remedy`` is the first one's text, empty without one."""

    id: str
    at: float
    pid: int
    start_ticks: int | None
    workload: str
    device_uuid: str | None
    summary: str
    missing_bytes: int | None
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error of one rank of a job; ``seconds_later`` than the first one of the job."""

    rank: int | None
    pid: int
    id: str
    seconds_later: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCase:
    """A case file, and the errors of all ranks of its job within a minute, first one first."""

    case: CaseFile
    ranks: tuple[RankError, ...] = ()


def summary_of(case: CaseFile) -> CaseSummary:
    return CaseSummary(
        id=case.id,
        at=case.at,
        pid=case.pid,
        start_ticks=case.start_ticks,
        workload=case.workload,
        device_uuid=case.device_uuid,
        summary=case.summary,
        missing_bytes=case.missing_bytes,
        remedy=case.remedies[0].text if case.remedies else "",
    )


def rank_order(case: CaseFile, cases: tuple[CaseFile, ...]) -> tuple[RankError, ...]:
    """Return the errors of all ranks of the job within a minute, first one first; empty for a program of one rank."""
    if case.rank is None:
        return ()
    group = (case.job, case.workload, case.uid)
    same = [
        each
        for each in cases
        if each.rank is not None
        and (each.job, each.workload, each.uid) == group
        and abs(each.at - case.at) <= RANK_SECONDS
    ]
    same.sort(key=lambda each: each.at)
    return tuple(
        RankError(rank=each.rank, pid=each.pid, id=each.id, seconds_later=each.at - same[0].at) for each in same
    )
