"""Carries one life of a plan's program out in real time: takes, gives and works when the plan says so.

Does not cover: processes (lives.py), and what a plan means (plan.py).
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
"""So much later than the plan's end, what is left of it is left out."""

CHECK_SECONDS = 30.0
PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class Executed:
    """What was done so far; bytes are the engine's own count."""

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
    """How a plan is carried out. ``fill`` is the share of the device that the plan may take for its whole card, with
    ``most_bytes`` as a cap; without either, the device itself stands for the plan's card.

    ``pause(seconds)`` waits, and is False when it is time to stop. ``flush`` is what a flush step does, if it is
    not the engine's own. ``verify``: blocks are written, and read again.
    """

    pause: Callable[[float], bool]
    fill: float | None = None
    most_bytes: int | None = None
    speed: float = 1.0
    flush: Callable[[], int] | None = None
    verify: bool = False
    progress: Callable[[float, Executed], None] | None = None


def lives(plan: Plan) -> Iterator[tuple[float, tuple[ScriptStep, ...]]]:
    """The plan's first program from start to end: when each begins, and its steps."""
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
    """Opens the engine and sets its limit. Raises Refused where the room is not there; nothing is taken then."""
    if plan.truth.kind == "orphan" and not engine.makes_orphans:
        raise AllocationRefused(
            "a healthy driver frees what a killed program had, so it leaves no orphan: use --engine sim"
        )
    room = engine.open()
    if terms.fill is None and terms.most_bytes is None:
        asked, scale = room.free_bytes, room.size_bytes / plan.size_bytes
    else:
        asked = int(room.size_bytes * (1.0 if terms.fill is None else terms.fill))
        asked = asked if terms.most_bytes is None else min(asked, terms.most_bytes)
        scale = (asked - engine.scratch_bytes) / (plan.size_bytes - CONTEXT_BYTES)
    needed = int(plan.peak_bytes * scale) + engine.scratch_bytes
    if scale <= 0 or needed > room.free_bytes:
        raise AllocationRefused(
            f"{plan.scenario} needs {human(needed)} on a device that has {human(room.free_bytes)} of "
            f"{human(room.size_bytes)} free: ask for less with --fill 40% or --max 8GiB, or free the device"
        )
    engine.limit(min(asked, room.free_bytes))
    return Executed(
        scale=scale, room_bytes=int(scale * (plan.size_bytes - CONTEXT_BYTES)), device_uuid=room.device_uuid
    )


def carry_out(
    steps: Sequence[ScriptStep], until: float, engine: LoadEngine, terms: Terms, carried: Executed
) -> Ending | None:
    """Does the steps, each in its time, and updates ``carried``. How the program is to end, if the plan says so.

    ``until`` is when the plan is over. The engine is left open.
    """
    life = _Life(engine, terms, carried)
    brim = steps[-1].action == "end" and steps[-1].ending == "crash"  # at which it waits for its death
    try:
        for number, step in enumerate(steps):
            if not life.wait(step.at):
                return None
            if carried.elapsed_seconds > until + LATE_SECONDS * terms.speed:
                carried.detail = f"too fast for this device: {len(steps) - number} steps of {len(steps)} were left out"
                break
            if step.action == "end":
                return step.ending
            try:
                life.do(step)
            except MemoryError:
                if not brim:
                    raise
        if brim:
            return "crash"
        if life.wait(until):
            life.check()
    except MemoryError as error:
        carried.outcome, carried.detail = "full", str(error)
    finally:
        life.look()
    return None


class _Life:
    def __init__(self, engine: LoadEngine, terms: Terms, carried: Executed) -> None:
        self._engine, self._terms, self._carried = engine, terms, carried
        self._started = time.monotonic() - carried.elapsed_seconds / terms.speed
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0
        self._written: set[int] = set()
        self._check_at = self._progress_at = 0.0
        self._at = -1.0

    def wait(self, at: float) -> bool:
        """Until that time of the plan. False, and the outcome set, if it is stopped before."""
        if at == self._at:
            return True
        while True:
            self.look()
            left = (at - self._carried.elapsed_seconds) / self._terms.speed
            if not self._terms.pause(max(0.0, min(left, PROGRESS_SECONDS))):
                self._carried.outcome = "stopped"
                return False
            if left <= PROGRESS_SECONDS:
                self._at = at
                return True

    def look(self) -> None:
        """How far it is, for whoever watches; now and then, whether the blocks are what was written."""
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
                raise MemoryError(f"{human(self._live_bytes)} are taken, and {human(carried.room_bytes)} is the most")
            engine.take(step.block, size, step.action == "take-outside")
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
            engine.give(step.block)
            carried.gives += 1
        elif step.action == "busy":
            engine.busy(step.ratio)
        elif step.action == "flush":
            carried.flushes += 1
            carried.released_bytes += (self._terms.flush or engine.flush)()
