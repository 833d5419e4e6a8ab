"""Simulation of a plan as sums of bytes, without an allocator: peaks, and the time of a full device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumond.loadgen.script import CONTEXT_BYTES, Script, ScriptStep


@dataclass(frozen=True, slots=True)
class Simulated:
    steps: list[ScriptStep]
    """Steps, without those of programs that are dead."""
    oom_at: float | None
    peak_bytes: int
    most_beside_bytes: float
    """Peak of program 0 after the onset of a leak, minus the leaked bytes at that time."""


def simulate(steps: Iterable[ScriptStep], script: Script) -> Simulated:
    """Simulate ``steps`` in order of time. A program dies when the device is full."""
    devices = [program.device for program in script.programs]
    used = [0] * (max(devices) + 1)
    held: list[dict[int, int]] = [{} for _ in devices]
    sums, running = [0] * len(devices), [False] * len(devices)
    peak, beside, oom_at = 0, 0.0, None
    onset = script.truth.injected_at
    rest, kept = LeakedBytes(script.kept), 0.0
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


class LeakedBytes:
    """Cumulative bytes of a leak at a time. Times must not decrease."""

    def __init__(self, kept: Sequence[tuple[float, float]]) -> None:
        self._rest, self._sum = sorted(kept, reverse=True), 0.0

    def until(self, at: float) -> float:
        while self._rest and self._rest[-1][0] <= at:
            self._sum += self._rest.pop()[1]
        return self._sum
