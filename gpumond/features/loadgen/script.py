"""Steps of plans, and the builder that scenarios use. Pure.

Times are seconds from the start, sizes bytes on a device of the plan's size. Each purpose has its own random
generator, so that the injection changes no other number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from gpumond.facts.units import GIB as GIB, MIB as MIB

CONTEXT_BYTES = 512 * MIB
"""Memory that a program uses before its first allocation."""

Action = Literal["start", "take", "take-outside", "give", "busy", "flush", "end"]
Ending = Literal["exit", "crash", "orphan-unlisted", "orphan-gone", "orphan-holder"]
View = Literal["agent", "process", "device"]
VIEWS: tuple[View, ...] = ("agent", "process", "device")


class ScriptStep(NamedTuple):
    """One action of one program. ``take-outside`` allocates outside the program's caching allocator."""

    at: float
    action: Action
    program: int = 0
    block: int = 0
    size_bytes: int = 0
    ratio: float = 0.0
    ending: Ending = "exit"


@dataclass(frozen=True, slots=True)
class ProgramScript:
    """A program of the plan. Real engines execute only the first."""

    name: str
    device: int = 0
    agent: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of the plan in virtual time.

    ``view``: ``agent`` (allocators report), ``process`` (the driver counts each process), ``device`` (only the
    whole device). ``noise_bytes``: standard deviation of the driver's values. ``sample_gaps``: 4 to 7 s
    without a sample every 35 s or so. ``outages``: start and length of times without any.
    """

    view: View = "agent"
    noise_bytes: int = 0
    sample_gaps: bool = False
    outages: tuple[tuple[float, float], ...] = ()
    quantum_bytes: int = 2 * MIB


@dataclass(frozen=True, slots=True)
class Truth:
    """Expected verdict on a plan. ``kind`` is empty if none is expected.

    ``oom_at``: projected time of a full device, possibly after the plan's end. ``ends_at``: end of the injected
    problem, at most the plan's end. ``slope_bytes_per_second`` is the mean during the problem.
    """

    kind: str = ""
    form: str = ""
    injected_at: float | None = None
    ends_at: float | None = None
    slope_bytes_per_second: float | None = None
    oom_at: float | None = None


class Script:
    """Builder of steps, which may be added in any order of time. Steps at one time keep their order."""

    def __init__(self, scenario: str, seed: int, options: Mapping[str, float | str], inject: bool) -> None:
        self._scenario, self._seed = scenario, seed
        self.chosen_options = dict(options)
        """All options, given or drawn."""
        self.inject = inject
        self.dice = self.random("parameters")
        self.size_bytes = int(self.number("size"))
        self.duration = 0.0
        self.programs: list[ProgramScript] = []
        self.steps: list[ScriptStep] = []
        self.truth = Truth()
        self.kept: Sequence[tuple[float, float]] = ()
        """Times and cumulative bytes of a leak."""
        self._next_block = 0

    def random(self, purpose: str) -> Random:
        """Return a random generator for one purpose. Text seeds go through SHA-512, the same in all Python versions."""
        return Random(f"{self._scenario}/{self._seed}/{purpose}")

    def number(self, option: str, drawn: float | None = None) -> float:
        """Return an option's value, else the drawn one."""
        value = self.chosen_options.setdefault(option, drawn or 0.0)
        assert isinstance(value, float | int), option
        return float(value)

    def word(self, option: str, drawn: str) -> str:
        return str(self.chosen_options.setdefault(option, drawn))

    def last(self, duration: float) -> float:
        """Set the length of the plan, unless an option does, and return it."""
        self.duration = self.number("duration", duration)
        return self.duration

    def program(self, name: str, at: float = 0.0, device: int = 0, agent: bool = True) -> int:
        self.programs.append(ProgramScript(name, device, agent))
        self.start(at, len(self.programs) - 1)
        return len(self.programs) - 1

    def start(self, at: float, program: int = 0) -> None:
        self.steps.append(ScriptStep(at, "start", program))

    def allocate(self, at: float, size: float, program: int = 0, outside: bool = False) -> int:
        self._next_block += 1
        action: Action = "take-outside" if outside else "take"
        self.steps.append(ScriptStep(at, action, program, self._next_block, max(1, int(size))))
        return self._next_block

    def free(self, at: float, block: int, program: int = 0) -> None:
        self.steps.append(ScriptStep(at, "give", program, block))

    def busy(self, at: float, ratio: float, program: int = 0) -> None:
        self.steps.append(ScriptStep(at, "busy", program, ratio=min(1.0, max(0.0, ratio))))

    def flush(self, at: float, program: int = 0) -> None:
        self.steps.append(ScriptStep(at, "flush", program))

    def end(self, at: float, ending: Ending = "exit", program: int = 0) -> None:
        self.steps.append(ScriptStep(at, "end", program, ending=ending))

    def fill(self, at: float, size: float, seconds: float, program: int = 0, pieces: int = 16) -> float:
        """Allocate the bytes in equal blocks over the seconds. Returns the end time."""
        for piece in range(pieces):
            self.allocate(at + seconds * piece / pieces, size / pieces, program)
        return at + seconds


class LevelStep:
    """A quantity that rises and falls, in blocks of one size."""

    def __init__(self, script: Script, unit: float, program: int = 0) -> None:
        self._script, self._unit, self._program = script, unit, program
        self._blocks: list[int] = []

    def to(self, at: float, size: float) -> None:
        wanted = max(0, round(size / self._unit))
        while len(self._blocks) < wanted:
            self._blocks.append(self._script.allocate(at, self._unit, self._program))
        while len(self._blocks) > wanted:
            self._script.free(at, self._blocks.pop(), self._program)


def every(start: float, end: float, period: float) -> Iterator[float]:
    """Yield times from start, one per period, before the end."""
    for number in range(max(0, int((end - start) / period) + 1)):
        at = start + number * period
        if at < end:
            yield at
