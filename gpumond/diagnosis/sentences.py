"""Verdicts in one sentence for people. Times of day are UTC. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.units import human

MINUTE, HOUR, DAY = 60, 3600, 86400
FORMS = {"linear": "", "stairs": ", in steps", "load-proportional": " of its present load"}


def leak(who: str, device: str, per_minute: float, since: float, left: float | None, form: str, outside: bool) -> str:
    where = " beside its pools, as a cache of compiled kernels or graphs does" if outside else ""
    pace = f"{human(per_minute)} more each minute{FORMS.get(form, '')}{where} since {clock(since)}"
    end = f"; {device} is full in {duration(left)}" if left is not None else ""
    return f"{who} keeps {pace}{end}"


def together(one: str, programs: int, devices: int) -> str:
    return f"{programs} programs on {devices} devices grow together, by more load or one fault in all: {one}"


def fragmentation(who: str, device: str, ratio: float, kept: float, live: float) -> str:
    return (
        f"{who} keeps {human(kept)} of {device} for {human(live)} at its peak: "
        f"{ratio:.0%} of its pool is split up, and no flush returns it"
    )


def pressure(device: str, ratio: float, left: float | None) -> str:
    end = f" and full in {duration(left)}" if left is not None else ""
    return f"{device} is {ratio:.1%} full{end}"


def orphan(device: str, size: float, seconds: float, who: str, holder: str) -> str:
    kept = f"{device} has {human(size)}"
    since = f"unchanged for {duration(seconds)}"
    if who:
        return f"{kept} of {who}, which is no more, {since}"
    named = f"; {holder} keeps the device open" if holder else ""
    return f"{kept} that no visible process owns, {since}{named}"


def idle(who: str, device: str, size: float, seconds: float) -> str:
    return f"{who} holds {human(size)} of {device} and has run nothing for {duration(seconds)}"


def crash(who: str, device: str, size: float, cause: str, certain: bool) -> str:
    who = "a program" if who == device else who
    return f"{who} {'crashed' if certain else 'probably crashed'} on {device} {cause}; it held {human(size)}"


def release(who: str, device: str, size: float) -> str:
    return f"{who} gave back {human(size)} of {device}"


def crash_loop(who: str, device: str, times: int) -> str:
    return f"{who} crashed {times} times on {device} within an hour"


def of_shape(kind: str, who: str, evidence: Mapping[str, float], since: float) -> str:
    if kind == "warm-up":
        return f"{who} is starting up, at {human(evidence['level_bytes'])} so far"
    if kind == "steady":
        return f"{who} stays at {human(evidence['level_bytes'])}"
    if kind == "step-change":
        size = evidence["step_bytes"]
        return f"{who} uses {human(abs(size))} {'more' if size > 0 else 'less'} since {clock(since)}, and stays there"
    low, high = human(evidence["low_bytes"]), human(evidence["high_bytes"])
    if kind == "periodic":
        return f"{who} rises to {high} and returns to {low} every {duration(evidence['period_seconds'])}"
    return f"{who} goes up and down between {low} and {high}, and grows no more"


def program(name: str, pid: int | None, device: str) -> str:
    return device if pid is None else f"{name or 'a program'} (pid {pid})"


def clock(at: float) -> str:
    minutes = int(at % DAY) // MINUTE
    return f"{minutes // 60:02}:{minutes % 60:02} UTC"


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``1 h 4 min``, ``3 d 2 h``."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"
