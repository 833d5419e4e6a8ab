"""A plan as sums of bytes, without an allocator: when its program finds the device full, and how high it gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumond.loadgen.script import CONTEXT_BYTES, Script, ScriptStep


@dataclass(frozen=True, slots=True)
class Simulated:
    steps: list[ScriptStep]
    """Without those of programs that do not live."""
    oom_at: float | None
    peak_bytes: int
    most_beside_bytes: float
    """The most that program 0 had after the onset of a leak, what it had kept of that taken off."""


def walk(steps: Iterable[ScriptStep], script: Script) -> Simulated:
    """``steps`` in order of time. A program that finds the device full has died."""
    devices = [program.device for program in script.programs]
    used = [0] * (max(devices) + 1)
    held: list[dict[int, int]] = [{} for _ in devices]
    sums, running = [0] * len(devices), [False] * len(devices)
    peak, beside, oom_at = 0, 0.0, None
    onset = script.truth.injected_at
    rest, kept = Kept(script.kept), 0.0
    lived: list[ScriptStep] = []
    for step in steps:
        at, action, program, block, size, _, _ = step
        if action == "start":
            running[program] = True
            size = CONTEXT_BYTES
        if not running[program]:
            continue
        lived.append(step)
        if action in ("start", "take", "take-outside"):
            if used[devices[program]] + size > script.size_bytes:
                if program == 0 and oom_at is None:
                    oom_at = at
                action = "end"
            else:
                held[program][block] = size
                sums[program] += size
                used[devices[program]] += size
        elif action == "give":
            size = held[program].pop(block)
            sums[program] -= size
            used[devices[program]] -= size
        if action == "end":
            used[devices[program]] -= sums[program]
            held[program], sums[program], running[program] = {}, 0, False
        if program == 0:
            peak = max(peak, sums[0] - CONTEXT_BYTES)
            if onset is not None and at >= onset and oom_at is None:
                kept = rest.until(at)
                beside = max(beside, sums[0] - kept)
    return Simulated(lived, oom_at, peak, beside)


class Kept:
    """How much of a leak was kept by a time; asked in order of time."""

    def __init__(self, kept: Sequence[tuple[float, float]]) -> None:
        self._rest, self._sum = sorted(kept, reverse=True), 0.0

    def until(self, at: float) -> float:
        while self._rest and self._rest[-1][0] <= at:
            self._sum += self._rest.pop()[1]
        return self._sum
