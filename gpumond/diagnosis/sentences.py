"""Sentences of verdicts. Times are UTC. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from gpumond.diagnosis.detectors import AllocationGrowth
from gpumond.facts.frame import Verdict
from gpumond.facts.program import Program, Retainer, location_text
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import (
    DAY_SECONDS,
    clock_text,
    duration_text,
    growth_rate_text,
    list_text,
    plural,
    rough_duration_text,
    size_text,
)
from gpumond.facts.verdicts import AT_PEAK_CONDITION

NOTABLE_DAYS = 30
"""Days within which the time until a device is full is worth stating."""

FORM_TEXTS = {"linear": (), "stairs": ("in steps",), "load-proportional": ("at the current load",)}


def leak(
    who: str,
    device: str,
    bytes_per_minute: float,
    since: float,
    now: float,
    seconds_left: float | None,
    form: str,
    is_outside_pools: bool,
    allocations: AllocationGrowth | None,
    peak_bytes: float,
    seconds_left_now: float | None,
) -> str:
    """Describe a leak; ``who`` is the device where no process is known. ``seconds_left`` is counted from the device's
    recent ``peak_bytes``, ``seconds_left_now`` from what is used now if that is notably less.
    """
    subject = who if who != device else "an unknown process"
    rate = " ".join((growth_rate_text(bytes_per_minute), *FORM_TEXTS.get(form, ())))
    details = [f"since {clock_text(since, now)}", *_allocation_details(allocations)]
    if is_outside_pools:
        details.append("outside its allocators' pools, possibly in a cache of compiled kernels or graphs")
    end = ""
    if seconds_left is not None:
        times = [rough_duration_text(seconds_left)]
        if seconds_left_now is not None and rough_duration_text(seconds_left_now) != rough_duration_text(seconds_left):
            times = [
                rough_duration_text(seconds_left_now),
                f"{rough_duration_text(seconds_left)} {AT_PEAK_CONDITION} of {size_text(peak_bytes)}",
            ]
        end = f"; at this rate, {device} will be full in {', or in '.join(times)}"
    return f"{subject} is leaking {rate} on {device} ({', '.join(details)}){end}"


def growing(
    who: str,
    device: str,
    bytes_per_minute: float,
    since: float,
    now: float,
    bytes_per_step: float | None,
    allocations: AllocationGrowth | None,
) -> str:
    """Describe growth that may become a leak; ``bytes_per_step``: bytes retained by each step, if the program counts
    steps.
    """
    subject = f"{who} on {device}" if who != device else f"memory of an unknown process on {device}"
    steps = [f"{size_text(bytes_per_step)} per step"] if bytes_per_step is not None and bytes_per_step > 0 else []
    details = [*steps, *_allocation_details(allocations)]
    clause = f" ({', '.join(details)})" if details else ""
    return (
        f"{subject} has been growing by {growth_rate_text(bytes_per_minute)} since {clock_text(since, now)}{clause}; "
        "this may be a leak, or growth that will stop: a startup, a filling cache or an evaluation"
    )


def _allocation_details(growth: AllocationGrowth | None) -> tuple[str, ...]:
    if growth is None or growth.number_rises is None:
        return ()
    return (
        f"with {growth.per_minute:.3g} more live allocations per minute"
        if growth.number_rises
        else "in a few large allocations",
    )


def growing_together(first_leak: str, programs: int, devices: int, seconds_left: float | None) -> str:
    """Describe programs that leak together. ``first_leak``: the leak of the first to fill its device, in
    ``seconds_left`` seconds.
    """
    where = f"{devices} GPUs" if devices > 1 else "one GPU"
    subject = (
        "One of them" if seconds_left is None else "The first to fill its GPU" if devices > 1 else "The fastest leak"
    )
    return (
        f"the memory of {programs} programs on {where} started growing at about the same time, possibly because of "
        f"higher load or the same bug. {subject}: {first_leak}"
    )


def fragmentation(who: str, device: str, kept_bytes: float, live_bytes: float) -> str:
    """Describe a fragmented program by its recent peaks. The ratio is in the alert, which covers a different window."""
    peak = f"held up to {size_text(kept_bytes)} on {device}, not counting its cache"
    return f"{who} recently {peak}, but at most {size_text(live_bytes)} of it was live; the rest was fragmented"


def orphan(device: str, size_bytes: float, unchanged_seconds: float, who: str, holder: str, programs: int) -> str:
    """Describe memory without an owner. ``programs``: number of programs on the device, one of which may own it: the
    driver counts managed memory for no process.
    """
    since = f"unchanged for {duration_text(unchanged_seconds)}"
    if who:
        return f"{device} still has {size_text(size_bytes)} in use that belonged to {who}, which has exited ({since})"
    named = f"; {holder} has the GPU open" if holder else ""
    if programs:
        which = "the program" if programs == 1 else f"one of the {programs} programs"
        managed = f"probably managed memory (cudaMallocManaged) of {which} on the GPU, or memory of an exited process"
        owned = f"that the driver attributes to no process ({since}): {managed}"
    else:
        owned = f"that belongs to no visible process ({since})"
    return f"{device} has {size_text(size_bytes)} in use {owned}{named}"


def idle(who: str, device: str, size_bytes: float, idle_seconds: float) -> str:
    used = (
        f"{who} uses {size_text(size_bytes)} on {device}"
        if who != device
        else f"{device} has {size_text(size_bytes)} in use"
    )
    return f"{used} and has been idle for {duration_text(idle_seconds)}"


def crash(who: str, device: str, size_bytes: float, cause: str, is_certain: bool) -> str:
    who = "a program" if who == device else who
    crashed = "crashed" if is_certain else "probably crashed"
    return f"{who} {crashed} on {device} {cause}; the program used {size_text(size_bytes)}"


def release(who: str, device: str, size_bytes: float, allocation_failed: bool = False) -> str:
    """Describe released memory; ``who`` is empty where the driver lists no processes. ``allocation_failed``: one of the
    program's allocations failed shortly before.
    """
    if not who:
        return f"{size_text(size_bytes)} on {device} was freed within seconds"
    return (
        f"{who} freed {size_text(size_bytes)} on {device}{' after an allocation failed' if allocation_failed else ''}"
    )


def crash_loop(who: str, device: str, times: int) -> str:
    return f"{who} crashed {times} times on {device} within an hour"


def pattern(
    kind: str, who: str, device: str, evidence: Mapping[str, float], since: float, now: float, at_step_end: bool = False
) -> str:
    """Describe a pattern. ``at_step_end``: at the end of each step."""
    is_device = who == device
    who = f"memory in use on {device}" if is_device else who
    if kind == "warm-up":
        subject = who if is_device else f"{who} is warming up: its memory"
        return f"{subject} hasn't been steady for long enough to judge"
    at = clock_text(since, now)
    if kind == "steady":
        where = " at the end of its steps" if at_step_end else ""
        return f"{who} has been steady at {size_text(evidence['level_bytes'])}{where} since {at}"
    if kind == "step-change":
        size = evidence["step_bytes"]
        verb, more, less = ("been", "higher", "lower") if is_device else ("used", "more", "less")
        return f"{who} has {verb} {size_text(abs(size))} {more if size > 0 else less} since {at}"
    if kind == "filling":
        seconds_left = evidence.get("full_seconds", inf)
        is_notable = seconds_left < NOTABLE_DAYS * DAY_SECONDS
        end = (
            f"; the GPU will be full in {rough_duration_text(seconds_left)}, unless growth stops" if is_notable else ""
        )
        rate = growth_rate_text(60 * evidence["slope_bytes_per_second"])
        return f"{who} has been growing more and more slowly since {at}, now by {rate}{end}"
    low, high = size_text(evidence["low_bytes"]), size_text(evidence["high_bytes"])
    if kind == "periodic":
        return f"{who} cycles between {low} and {high} every {duration_text(evidence['period_seconds'])}"
    return f"{who} fluctuates between {low} and {high} without growing"


def program_text(name: str, pid: int | None, device: str) -> str:
    return device if pid is None else f"{name or 'a program'} (pid {pid})"


MAX_RETAINERS = 2
MAX_LINE_CHARACTERS = 240
"""Longest text of a line: an agent may send any."""


def with_retainers(verdicts: Iterable[Verdict], snapshot: Snapshot) -> tuple[Verdict, ...]:
    """Append to the growth of a program what retains its memory, as far as its agent has found it."""
    return tuple(
        _with_retainers(verdict, snapshot) if verdict.kind in ("leak", "growing") else verdict for verdict in verdicts
    )


def _with_retainers(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    report = None if verdict.process is None else snapshot.reports_by_process.get(verdict.process)
    text = "" if report is None else retained_by(report.program)
    return replace(verdict, summary=f"{verdict.summary}; {text}", retained_by=text) if text else verdict


def retained_by(program: Program) -> str:
    """Return the lines that retain memory, else the scope that retains the most; empty if neither is known."""
    if program.retainers:
        lines = [_retainer_text(retainer) for retainer in program.retainers[:MAX_RETAINERS]]
        return f"{list_text(lines)} {'retains' if len(lines) == 1 else 'retain'} the memory"
    retained_bytes = {
        scope.name: sum(device.retained_bytes for device in scope.devices)
        for scope in program.scopes
        if scope.entries > 1 and sum(device.last_retained_bytes for device in scope.devices) > 0  # not a set-up
    }
    name = max(retained_bytes, key=lambda name: retained_bytes[name], default="")
    return (
        f"the measured scope {name} retains {size_text(retained_bytes[name])}"
        if retained_bytes.get(name, 0) > 0
        else ""
    )


def _retainer_text(retainer: Retainer) -> str:
    name = f"`{retainer.name}` in " if retainer.name else ""
    text = f"{name}`{retainer.function}` at {location_text(retainer)}"
    return f"{text[-MAX_LINE_CHARACTERS:]} ({plural(retainer.tensors, 'tensor')} added in 20 s)"
