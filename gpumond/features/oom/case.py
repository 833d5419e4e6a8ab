"""The case of one out-of-memory error, also as text and as an HTML document. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpumond.events import MAX_CALL_CHARACTERS, call_text, program_calls
from gpumond.facts.frame import LedgerLine
from gpumond.facts.program import CLASS_NAMES, Call, HasProcessKey, LiveClasses, Oom
from gpumond.facts.units import size_text
from gpumond.view import html_report as html, text
from gpumond.view.text import size_or_dash, time_text

Basis = Literal["measured", "reported", "estimate"]
"""Source of a remedy's bytes: the driver or the program's own counters, an agent's statement about a possible flush, or
an estimate.
"""

RANK_SECONDS = 60.0
"""Errors of the ranks of one job within this time belong together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change, and the bytes that it makes available on the device; None if they are unknown.

    ``enough``: the change alone would have been enough; None if unknown. ``source``: where the number of bytes comes
    from. The remedy ``nothing`` says that no remedy is enough.
    """

    name: str
    text: str
    size_bytes: int | None
    enough: bool | None
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes of one program, or of all the rest (``pid`` None), at the times of the timeline; unknown is None."""

    pid: int | None
    workload: str
    used_bytes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was on a device in the ten minutes before an error; ``at`` are Unix times.

    For a program that reached its own limit, it is what counted against this limit: the bytes that its allocator held,
    or had handed out of an arena.
    """

    at: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OomCase(HasProcessKey):
    """What is known about one out-of-memory error, and the remedies, the most effective first.

    ``summary`` is one sentence. ``oom`` is the program's record; it's None for a program without an agent, about which
    only the driver's numbers are known. ``missing_bytes``: what the request lacked; of repeated errors, the most that
    one lacked. ``reserved_bytes``: what the driver keeps of the device. ``limit_bytes``: the program's own limit, if
    that was the cause; its repeated errors at this limit are one case, whose first has the ``id``, and ``errors`` is
    their number. ``lines`` are the device's ledger at the last tick before the error, at ``lines_at``, with the
    program's own bytes at the error, and ``overcount_bytes`` those of them that were free at the error;
    ``reported_at`` is the time of the program's report, if the record doesn't contain its own bytes.
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
    reserved_bytes: int | None = None
    remedies: tuple[Remedy, ...] = ()
    uid: int | None = None
    job: str = ""
    rank: int | None = None
    oom: Oom | None = None
    lines: tuple[LedgerLine, ...] = ()
    lines_at: float | None = None
    overcount_bytes: int = 0
    reported_at: float | None = None
    timeline: Timeline = Timeline()
    limit_bytes: int | None = None
    errors: int = 1

    @property
    def known_remedies(self) -> tuple[Remedy, ...]:
        return tuple(remedy for remedy in self.remedies if remedy.name != "nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """A case in a list. ``remedy`` is the first remedy's text, empty without one."""

    id: str
    at: float
    pid: int
    start_ticks: int | None
    workload: str
    device_uuid: str | None
    summary: str
    missing_bytes: int | None
    remedy: str
    request_bytes: int | None = None
    free_bytes: int | None = None
    errors: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error of one rank of a job; ``seconds_later`` than the first one of the job."""

    rank: int | None
    pid: int
    id: str
    seconds_later: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCase:
    """A case, and the errors of all ranks in its job within a minute, earliest first."""

    case: OomCase
    ranks: tuple[RankError, ...] = ()


def summary_of(case: OomCase) -> CaseSummary:
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
        request_bytes=case.request_bytes,
        free_bytes=case.free_bytes,
        errors=case.errors,
    )


def effect_order(remedy: Remedy) -> int:
    """Return the key that sorts remedies: those that alone would have been enough come first, then the unknown."""
    return {True: 0, None: 1, False: 2}[remedy.enough]


def with_repeats(before: OomCase, case: OomCase, errors: int) -> OomCase:
    """Return the case of as many more errors that repeat ``before`` at the same limit.

    Its facts are those of the newest error, except the shortage and the first remedy: those of the largest shortage.
    """
    own_remedy, largest = case.remedies[0], max(case, before, key=lambda each: each.missing_bytes or 0)
    missing = largest.missing_bytes or 0
    others = [
        replace(each, enough=False) if each.enough and (each.size_bytes or 0) < missing else each
        for each in case.remedies[1:]
    ]
    others.sort(key=effect_order)
    return replace(
        case,
        id=before.id,
        summary=case.summary.replace(own_remedy.text, largest.remedies[0].text),
        missing_bytes=largest.missing_bytes,
        remedies=(largest.remedies[0], *others),
        errors=before.errors + errors,
    )


def rank_errors(case: OomCase, cases: tuple[OomCase, ...]) -> tuple[RankError, ...]:
    """Return the errors of all ranks of the job within a minute, first one first; empty for a program of one rank."""
    if case.rank is None:
        return ()
    group = (case.job, case.workload, case.uid)
    same_job = [
        each
        for each in cases
        if each.rank is not None
        and (each.job, each.workload, each.uid) == group
        and abs(each.at - case.at) <= RANK_SECONDS
    ]
    same_job.sort(key=lambda each: each.at)
    return tuple(
        RankError(rank=each.rank, pid=each.pid, id=each.id, seconds_later=each.at - same_job[0].at) for each in same_job
    )


REMEDY_HEADER = ("ENOUGH", ">BYTES", "SOURCE", "REMEDY")
MEMORY_VIZ = "https://pytorch.org/memory_viz"


def terminal_text(case: OomCase, ranks: Sequence[RankError], width: int | None = None) -> str:
    """Return the case for a terminal of that width."""
    parts = [f"case {case.id}, {_time_line(case)}", text.wrap_text(text.printable(case.summary), width)]
    if case.remedies:
        parts.append(text.table(REMEDY_HEADER, remedy_rows(case)))
    for title, header, rows in sections(case, ranks):
        parts.append(f"{title}\n{text.table(header, rows)}")
    if hint := snapshot_hint(case):
        parts.append(hint)
    return "\n\n".join(parts)


def html_document(case: OomCase, ranks: Sequence[RankError]) -> str:
    """Return the case as HTML."""
    parts = [html.paragraph(_time_line(case)), html.paragraph(case.summary)]
    if case.remedies:
        header = [name.capitalize() if not name.startswith(">") else ">Bytes" for name in REMEDY_HEADER]
        parts += [html.heading("What would have prevented the error"), html.table(header, remedy_rows(case))]
    times, curves = case.timeline.at, case.timeline.curves
    if case.limit_bytes is not None and len(curves) == 1:
        points = [(at, float(used)) for at, used in zip(times, curves[0].used_bytes, strict=True) if used is not None]
        title = (
            f"The program's memory in the ten minutes before the error, and its limit of {size_text(case.limit_bytes)}"
        )
        parts += [html.heading(title), html.curve(points, case.limit_bytes, ())]
    elif times:
        areas = [(_program_label(each.pid, each.workload), each.used_bytes) for each in curves]
        parts += [html.heading("The GPU in the ten minutes before the error"), html.areas(times, areas)]
    for title, names, rows in sections(case, ranks):
        cells = [name if not name.startswith(">") else f">{name[1:].capitalize()}" for name in names]
        parts += [html.heading(title), html.table([each.capitalize() for each in cells], rows)]
    if hint := snapshot_hint(case):
        parts += [html.heading("The framework's snapshot"), html.paragraph(hint)]
    return html.html_page(f"Out of memory: case {case.id}", parts)


def _time_line(case: OomCase) -> str:
    lacked = "" if case.missing_bytes is None else f"; up to {size_text(case.missing_bytes)} was missing"
    repeated = f", the last of {case.errors} errors at this limit{lacked}" if case.errors > 1 else ""
    return f"{time_text(case.at)}{repeated}"


def remedy_rows(case: OomCase) -> Iterator[list[str]]:
    for each in case.remedies:
        prefix = "about " if each.basis == "estimate" and each.size_bytes is not None else ""
        enough = {True: "yes", False: "no", None: "unknown"}[each.enough]
        source = f"{each.source} ({each.basis})" if each.basis == "estimate" else each.source
        yield [enough, f"{prefix}{size_or_dash(each.size_bytes)}", source, each.text]


def sections(case: OomCase, ranks: Sequence[RankError]) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield title, header and rows of each table of facts."""
    if case.oom is not None and case.oom.stack:
        yield (
            "Call stack at the error, innermost call first",
            ("CALL",),
            [[call_text(call)] for call in program_calls(case.oom.stack)],
        )
    if case.oom is not None and case.oom.pools:
        rows = [
            [pool.allocator, *map(size_text, (pool.live_bytes, pool.cached_bytes, pool.stranded_bytes))]
            for pool in case.oom.pools
            if case.device_uuid in (None, pool.device_uuid)
        ]
        yield (
            f"The program's pools {_at_or_after(case.oom)} the error",
            ("ALLOCATOR", ">LIVE", ">CACHED", ">STRANDED"),
            rows,
        )
    if case.lines:
        lines = sorted(case.lines, key=lambda line: -line.used_bytes)
        rows = [
            [_program_label(line.pid, line.workload), line.share, size_text(line.used_bytes)]
            for line in lines
            if line.used_bytes
        ]
        rest = (("reserved", case.reserved_bytes), ("free", case.free_bytes))
        rows += [["", name, size_text(value)] for name, value in rest if value is not None]
        rows += [["", "overcount", f"-{size_text(case.overcount_bytes)}"]] if case.overcount_bytes else []
        yield _ledger_title(case), ("PROGRAM", "SHARE", ">BYTES"), rows
    if len(ranks) > 1:
        rows = [[str(each.rank), str(each.pid), f"{each.seconds_later:.1f} s", each.id] for each in ranks]
        yield "Order of the ranks", (">RANK", ">PID", ">LATER", "CASE"), rows
    if case.oom is None:
        return
    for classes in case.oom.classes:
        yield f"Live bytes of {classes.allocator} by class", ("CLASS", ">BYTES"), list(_class_rows(classes))
    if case.oom.sites:
        rows = [[size_text(site.size_bytes), str(site.blocks), _calls_text(site.calls)] for site in case.oom.sites]
        yield "Largest allocation sites", (">BYTES", ">BLOCKS", "CALLS, INNERMOST FIRST"), rows
    if case.oom.scopes:
        yield (
            "Scopes that retain the most memory",
            ("SCOPE", ">BYTES"),
            [[scope.name, size_text(scope.retained_bytes)] for scope in case.oom.scopes],
        )


def _ledger_title(case: OomCase) -> str:
    if case.lines_at is None:
        return "GPU memory"
    own_note = ""
    if case.reported_at is not None:
        own_note = f" (the program's report: {_offset_from_error(case.at, case.reported_at)})"
    if case.oom is not None and case.oom.pools:
        own_note = f" (this program: {_at_or_after(case.oom)} the error)"
    return f"GPU memory {_offset_from_error(case.at, case.lines_at)}{own_note}"


def _at_or_after(oom: Oom) -> str:
    """Return whether the program's own bytes are those at the error, or after it, when it may have freed some."""
    return "after" if oom.seen == "counter" else "at"


def _offset_from_error(error_at: float, at: float) -> str:
    seconds = f"{abs(error_at - at):.1f}"
    return "at the error" if seconds == "0.0" else f"{seconds} s {'before' if at < error_at else 'after'} the error"


def snapshot_hint(case: OomCase) -> str:
    """Return how to get PyTorch's snapshot; empty for other allocators."""
    if case.oom is None or all(pool.allocator != "torch" for pool in case.oom.pools):
        return ""
    return (
        f"While the program runs: gpumond snapshot --pid {case.pid} --out memory.pickle writes the framework's own "
        f"snapshot. Open the file in {MEMORY_VIZ}"
    )


def _class_rows(classes: LiveClasses) -> Iterator[list[str]]:
    for name, class_name in CLASS_NAMES.items():
        value = getattr(classes, f"{name}_bytes")
        if value is not None:
            yield [class_name, size_text(value)]
    if classes.unknown_bytes:
        yield ["unknown", size_text(classes.unknown_bytes)]


def _calls_text(calls: Sequence[Call]) -> str:
    return " < ".join(map(call_text, calls[:3]))[: 3 * MAX_CALL_CHARACTERS]


def _program_label(pid: int | None, workload: str) -> str:
    return workload or "unattributed" if pid is None else f"{workload or 'pid'} {pid}"
