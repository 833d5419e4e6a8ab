"""Sentences of verdicts. Times of day are UTC. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.facts.frame import Verdict
from gpumond.facts.program import Program, Retainer
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import DAY_SECONDS, about, duration, human

FORMS = {"linear": "", "stairs": ", in steps", "load-proportional": " at its present load"}


def leak(
    who: str,
    device: str,
    per_minute: float,
    since: float,
    left: float | None,
    form: str,
    outside: bool,
    allocations: AllocationGrowth | None,
) -> str:
    """Describe a leak; ``who`` is the device where no process is known."""
    owner = f"{who} on {device}" if who != device else f"{device} without a known process"
    part = " outside its allocators' pools" if outside else ""
    pace = f"has grown by {human(per_minute)} each minute{FORMS.get(form, '')} since {clock(since)}"
    likely = ", possibly in a cache of compiled kernels or graphs" if outside else ""
    end = f"; {device} is full in {about(left)} at this rate, from its recent peak" if left is not None else ""
    return f"memory of {owner}{part} {pace}{_number(allocations)}{likely}{end}"


def growing(
    who: str,
    device: str,
    per_minute: float,
    since: float,
    step: float | None,
    allocations: AllocationGrowth | None,
) -> str:
    """Describe growth that may become a leak; ``step``: bytes kept by each step, if the program counts steps."""
    owner = f"{who} on {device}" if who != device else f"{device} without a known process"
    each = f", {human(step)} in each step" if step is not None and step > 0 else ""
    return (
        f"memory of {owner} grows by {human(per_minute)} each minute{each} since {clock(since)}"
        f"{_number(allocations)}. It is a leak"
        " if it continues at this rate for 6 to 14 minutes; a start, a cache or an evaluation slows down or returns it"
    )


def _number(growth: AllocationGrowth | None) -> str:
    if growth is None or growth.rises is None:
        return ""
    more = f"with {growth.per_minute:.3g} more live allocations each minute"
    return f", {more}" if growth.rises else ", in few, large allocations"


def together(one: str, programs: int, devices: int) -> str:
    cause = "because of a higher load or a common defect"
    return f"{programs} programs on {devices} devices began to grow at the same time, {cause}: {one}"


def fragmentation(who: str, device: str, ratio: float, kept: float, live: float) -> str:
    return (
        f"{who} held {human(kept)} of {device} at its peak, of which at most {human(live)} were live: "
        f"{100 * ratio:.1f} % of its pool was fragmented"
    )


def orphan(device: str, size: float, seconds: float, who: str, holder: str, programs: int) -> str:
    """Describe memory without an owner. ``programs``: number of programs on the device, one of which may own it: the
    driver counts managed memory for no process.
    """
    since = f"unchanged for {duration(seconds)}"
    if who:
        return f"{who} has ended, but {device} still holds {human(size)} of its memory, {since}"
    named = f"; {holder} keeps the device open" if holder else ""
    if programs:
        owner = "the program" if programs == 1 else f"one of the {programs} programs"
        managed = f"managed memory (cudaMallocManaged) of {owner} on the device, or memory of an ended process"
        return f"{device} holds {human(size)} that the driver counts for no process, {since}: {managed}{named}"
    return f"{device} holds {human(size)} that no visible process owns, {since}{named}"


def idle(who: str, device: str, size: float, seconds: float) -> str:
    held = f"{who} holds {human(size)} of {device}" if who != device else f"{device} has {human(size)} in use"
    return f"{held} and has been idle for {duration(seconds)}"


def crash(who: str, device: str, size: float, cause: str, certain: bool) -> str:
    who = "a program" if who == device else who
    return f"{who} {'crashed' if certain else 'probably crashed'} on {device} {cause}; it held {human(size)}"


def release(who: str, device: str, size: float) -> str:
    """Describe released memory; ``who`` is empty where the driver lists no processes."""
    if not who:
        return f"{human(size)} of {device} became free at once"
    return f"{who} freed {human(size)} of {device}"


def crash_loop(who: str, device: str, times: int) -> str:
    return f"{who} crashed {times} times on {device} within an hour"


def of_shape(kind: str, who: str, evidence: Mapping[str, float], since: float) -> str:
    if kind == "warm-up":
        return f"{who} is starting and uses {human(evidence['level_bytes'])} so far"
    if kind == "steady":
        return f"{who} stays at {human(evidence['level_bytes'])}"
    if kind == "step-change":
        size = evidence["step_bytes"]
        return f"{who} has used {human(abs(size))} {'more' if size > 0 else 'less'} since {clock(since)}"
    low, high = human(evidence["low_bytes"]), human(evidence["high_bytes"])
    if kind == "periodic":
        return f"{who} rises to {high} and returns to {low} every {duration(evidence['period_seconds'])}"
    return f"{who} varies between {low} and {high} and does not grow"


def program(name: str, pid: int | None, device: str) -> str:
    return device if pid is None else f"{name or 'a program'} (pid {pid})"


def clock(at: float) -> str:
    minutes, seconds = divmod(int(at % DAY_SECONDS), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02} UTC"


SHOWN = 2
MAX_PLACE = 240
"""Longest text of a line: an agent may send any."""


def with_retainers(verdicts: Iterable[Verdict], snapshot: Snapshot) -> tuple[Verdict, ...]:
    """Append to each leak of a program what keeps its memory, as far as its agent has found it."""
    return tuple(_with_retainers(verdict, snapshot) if verdict.kind == "leak" else verdict for verdict in verdicts)


def _with_retainers(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    report = None if verdict.process is None else snapshot.reports_by_process.get(verdict.process)
    text = "" if report is None else kept_by(report.program)
    return replace(verdict, summary=f"{verdict.summary}; {text}") if text else verdict


def kept_by(program: Program) -> str:
    """Return the lines that keep memory, else the scope that keeps most; empty if neither is known."""
    if program.retainers:
        return "kept by " + ", ".join(map(_line, program.retainers[:SHOWN]))
    kept = {
        scope.name: sum(device.kept_bytes for device in scope.devices)
        for scope in program.scopes
        if scope.entries > 1 and sum(device.last_kept_bytes for device in scope.devices) > 0  # not a set-up
    }
    name = max(kept, key=lambda name: kept[name], default="")
    return f"the scope {name} keeps {human(kept[name])}" if kept.get(name, 0) > 0 else ""


def _line(retainer: Retainer) -> str:
    name = f"{retainer.name} in " if retainer.name else ""
    place = f"{name}{retainer.function} at {retainer.file}:{retainer.line}"
    return f"{place[-MAX_PLACE:]} ({retainer.tensors} tensors in 20 s)"
