"""Execution of one run of a plan's program in real time: allocations, frees and work at the planned times.

Processes are started in runner.py; plans are made in plan.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gpumond.loadgen.engines import AllocationRefused, LoadEngine
from gpumond.loadgen.plan import Plan
from gpumond.loadgen.script import CONTEXT_BYTES, Ending, ScriptStep
from gpumond.model.units import human

Outcome = Literal["done", "stopped", "full", "crash", "orphan"]

LATE_SECONDS = 1.0
"""Delay after the plan's end at which the remaining steps are skipped, in seconds."""

CHECK_SECONDS = 30.0
PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class Executed:
    """Work done so far. Bytes are counted by the engine."""

    outcome: Outcome = "done"
    detail: str = ""
    scale: float = 1.0
    room_bytes: int = 0
    device_uuid: str | None = None
    elapsed_seconds: float = 0.0
    taken_bytes: int = 0
    takes: int = 0
    gives: int = 0
    peak_live_bytes: int = 0
    peak_held_bytes: int = 0
    flushes: int = 0
    released_bytes: int = 0
    checked_bytes: int = 0
    wrong_words: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits and hooks of an execution. The plan's device is scaled to the share ``fill`` of the real device and to at
    most ``most_bytes``; without either, to the whole device.

    ``pause(seconds)`` waits and returns False to stop. ``flush`` replaces the engine's own flush. ``verify``: blocks
    are written and read again.
    """

    pause: Callable[[float], bool]
    fill: float | None = None
    most_bytes: int | None = None
    speed: float = 1.0
    flush: Callable[[], int] | None = None
    verify: bool = False
    progress: Callable[[float, Executed], None] | None = None


def runs(plan: Plan) -> Iterator[tuple[float, tuple[ScriptStep, ...]]]:
    """Return the runs of the plan's first program: start time and steps of each."""
    steps: list[ScriptStep] = []
    for step in plan.steps:
        if step.program:
            continue
        if step.action == "start" and steps:
            yield steps[0].at, tuple(steps)
            steps = []
        steps.append(step)
    if steps:
        yield steps[0].at, tuple(steps)


def prepare(plan: Plan, engine: LoadEngine, terms: Terms) -> Executed:
    """Open the engine and set its limit. Raises AllocationRefused without enough memory; nothing is allocated then."""
    if plan.truth.kind == "orphan" and not engine.makes_orphans:
        raise AllocationRefused(
            "a driver frees the memory of a killed program, so there is no orphan on a real device: use --engine sim"
        )
    room = engine.open()
    if terms.fill is None and terms.most_bytes is None:
        limit_bytes, scale = room.free_bytes, room.size_bytes / plan.size_bytes
    else:
        limit_bytes = int(room.size_bytes * (1.0 if terms.fill is None else terms.fill))
        limit_bytes = limit_bytes if terms.most_bytes is None else min(limit_bytes, terms.most_bytes)
        scale = (limit_bytes - engine.scratch_bytes) / (plan.size_bytes - CONTEXT_BYTES)
    needed = int(plan.peak_bytes * scale) + engine.scratch_bytes
    if scale <= 0 or needed > room.free_bytes:
        raise AllocationRefused(
            f"{plan.scenario} needs {human(needed)}, and the device has {human(room.free_bytes)} of "
            f"{human(room.size_bytes)} free: request less with --fill 40% or --max 8GiB, or free the device"
        )
    engine.limit(min(limit_bytes, room.free_bytes))
    return Executed(
        scale=scale, room_bytes=int(scale * (plan.size_bytes - CONTEXT_BYTES)), device_uuid=room.device_uuid
    )


def carry_out(
    steps: Sequence[ScriptStep], until: float, engine: LoadEngine, terms: Terms, carried: Executed
) -> Ending | None:
    """Execute the steps at their times and update ``carried``. Returns how the program must end, if the plan states it.

    ``until`` is the end of the plan. The engine is left open.
    """
    run = _Run(engine, terms, carried)
    brim = steps[-1].action == "end" and steps[-1].ending == "crash"  # the time at which the program is killed
    try:
        for number, step in enumerate(steps):
            if not run.wait(step.at):
                return None
            if carried.elapsed_seconds > until + LATE_SECONDS * terms.speed:
                carried.detail = f"too fast for this device: {len(steps) - number} steps of {len(steps)} were skipped"
                break
            if step.action == "end":
                return step.ending
            try:
                run.do(step)
            except MemoryError:
                if not brim:
                    raise
        if brim:
            return "crash"
        if run.wait(until):
            run.check()
    except MemoryError as error:
        carried.outcome, carried.detail = "full", str(error)
    finally:
        run.update_progress()
    return None


class _Run:
    def __init__(self, engine: LoadEngine, terms: Terms, carried: Executed) -> None:
        self._engine, self._terms, self._carried = engine, terms, carried
        self._started = time.monotonic() - carried.elapsed_seconds / terms.speed
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._written: set[int] = set()
        self._check_at = self._progress_at = 0.0
        self._at = -1.0

    def wait(self, at: float) -> bool:
        """Wait until a time of the plan. Returns False and sets the outcome if stopped before."""
        if at == self._at:
            return True
        while True:
            self.update_progress()
            left = (at - self._carried.elapsed_seconds) / self._terms.speed
            if not self._terms.pause(max(0.0, min(left, PROGRESS_SECONDS))):
                self._carried.outcome = "stopped"
                return False
            if left <= PROGRESS_SECONDS:
                self._at = at
                return True

    def update_progress(self) -> None:
        """Update the progress, and periodically verify the blocks."""
        carried, now = self._carried, time.monotonic()
        carried.elapsed_seconds = (now - self._started) * self._terms.speed
        carried.peak_live_bytes = max(carried.peak_live_bytes, self._engine.live_bytes())
        carried.peak_held_bytes = max(carried.peak_held_bytes, self._engine.held_bytes())
        if self._terms.progress is not None and now >= self._progress_at:
            self._progress_at = now + PROGRESS_SECONDS
            self._terms.progress(carried.elapsed_seconds, carried)
        if now >= self._check_at:
            self.check()
            self._check_at = time.monotonic() + CHECK_SECONDS

    def check(self) -> None:
        for block in self._written:
            self._carried.wrong_words += self._engine.wrong_words(block)
            self._carried.checked_bytes += self._sizes[block]

    def do(self, step: ScriptStep) -> None:
        carried, engine = self._carried, self._engine
        if step.action in ("take", "take-outside"):
            size = max(1, int(step.size_bytes * carried.scale))
            if self._live_bytes + size > carried.room_bytes:
                raise MemoryError(
                    f"{human(self._live_bytes)} are allocated, and the limit is {human(carried.room_bytes)}"
                )
            engine.allocate(step.block, size, step.action == "take-outside")
            self._live_bytes += size
            self._sizes[step.block] = size
            carried.takes += 1
            carried.taken_bytes += size
            if self._terms.verify and engine.has_contents:
                engine.write(step.block)
                self._written.add(step.block)
        elif step.action == "give" and step.block in self._sizes:
            self._live_bytes -= self._sizes.pop(step.block)
            self._written.discard(step.block)
            engine.free(step.block)
            carried.gives += 1
        elif step.action == "busy":
            engine.busy(step.ratio)
        elif step.action == "flush":
            carried.flushes += 1
            carried.released_bytes += (self._terms.flush or engine.flush)()
