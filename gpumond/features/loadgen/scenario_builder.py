"""Scenarios as records, and the builder with which they write the steps of a plan. No I/O.

Below the pattern of a scenario, its program behaves as usual: it warms up, works, and its use of memory has noise.

Times are seconds from the start, sizes bytes on a device of the plan's size. Each purpose has its own random
generator, so the injection changes no other number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import (
    GIB,
    MIB,
    MINUTE_SECONDS,
    duration_text,
    parse_seconds,
    parse_size_argument,
    parse_threshold,
    size_text,
)

CONTEXT_BYTES = 512 * MIB
"""Memory that a program uses before its first allocation."""

Action = Literal["start", "take", "take-outside", "give", "busy", "flush", "end"]
ProgramEnding = Literal["exit", "crash", "orphan-unlisted", "orphan-gone", "orphan-holder"]
View = Literal["agent", "process", "device"]
VIEWS: tuple[View, ...] = ("agent", "process", "device")


class PlanStep(NamedTuple):
    """One action of one program. ``take-outside`` allocates outside the program's caching allocator."""

    at: float
    action: Action
    program: int = 0
    block: int = 0
    size_bytes: int = 0
    ratio: float = 0.0
    ending: ProgramEnding = "exit"


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program of the plan. Real backends execute only the first."""

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


@dataclass(frozen=True, slots=True)
class ExpectedVerdict:
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


class PlanBuilder:
    """Builder of steps, which may be added in any order of time. Steps at one time keep their order."""

    def __init__(self, scenario: str, seed: int, options: Mapping[str, float | str], inject: bool) -> None:
        self._scenario, self._seed = scenario, seed
        self.chosen_options = dict(options)
        """All options, given or drawn."""
        self.inject = inject
        self.rng = self.random("parameters")
        self.size_bytes = int(self.choose_number("size"))
        self.duration = 0.0
        self.programs: list[PlannedProgram] = []
        self.steps: list[PlanStep] = []
        self.expected_verdict = ExpectedVerdict()
        self.leaked: Sequence[tuple[float, float]] = ()
        """Times and cumulative bytes of a leak."""
        self._next_block = 0

    def random(self, purpose: str) -> Random:
        """Return a random generator for one purpose. Text seeds go through SHA-512, the same in all Python versions."""
        return Random(f"{self._scenario}/{self._seed}/{purpose}")

    def choose_number(self, option: str, drawn: float | None = None) -> float:
        """Return an option's value, else the drawn one."""
        value = self.chosen_options.setdefault(option, drawn or 0.0)
        assert isinstance(value, float | int), option
        return float(value)

    def choose_word(self, option: str, drawn: str) -> str:
        return str(self.chosen_options.setdefault(option, drawn))

    def choose_length(self, duration: float) -> float:
        """Set the length of the plan, unless an option does, and return it."""
        self.duration = self.choose_number("duration", duration)
        return self.duration

    def program(self, name: str, at: float = 0.0, device: int = 0, agent: bool = True) -> int:
        self.programs.append(PlannedProgram(name, device, agent))
        self.start(at, len(self.programs) - 1)
        return len(self.programs) - 1

    def start(self, at: float, program: int = 0) -> None:
        self.steps.append(PlanStep(at, "start", program))

    def allocate(self, at: float, size: float, program: int = 0, outside: bool = False) -> int:
        self._next_block += 1
        action: Action = "take-outside" if outside else "take"
        self.steps.append(PlanStep(at, action, program, self._next_block, max(1, int(size))))
        return self._next_block

    def free(self, at: float, block: int, program: int = 0) -> None:
        self.steps.append(PlanStep(at, "give", program, block))

    def busy(self, at: float, ratio: float, program: int = 0) -> None:
        self.steps.append(PlanStep(at, "busy", program, ratio=min(1.0, max(0.0, ratio))))

    def flush(self, at: float, program: int = 0) -> None:
        self.steps.append(PlanStep(at, "flush", program))

    def end(self, at: float, ending: ProgramEnding = "exit", program: int = 0) -> None:
        self.steps.append(PlanStep(at, "end", program, ending=ending))

    def fill(self, at: float, size: float, seconds: float, program: int = 0, pieces: int = 16) -> float:
        """Allocate the bytes in equal blocks over the seconds. Returns the end time."""
        for piece in range(pieces):
            self.allocate(at + seconds * piece / pieces, size / pieces, program)
        return at + seconds


class VaryingAmount:
    """A quantity that rises and falls, in blocks of one size."""

    def __init__(self, builder: PlanBuilder, unit: float, program: int = 0) -> None:
        self._builder, self._unit, self._program = builder, unit, program
        self._blocks: list[int] = []

    def resize(self, at: float, size: float) -> None:
        wanted = max(0, round(size / self._unit))
        while len(self._blocks) < wanted:
            self._blocks.append(self._builder.allocate(at, self._unit, self._program))
        while len(self._blocks) > wanted:
            self._builder.free(at, self._blocks.pop(), self._program)


def every(start: float, end: float, period: float) -> Iterator[float]:
    """Yield times from start, one per period, before the end."""
    for number in range(max(0, int((end - start) / period) + 1)):
        at = start + number * period
        if at < end:
            yield at


Unit = Literal["size", "duration", "fraction", "number", "word"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option with bounds. ``default_text`` describes the value that is used if the option is not given."""

    name: str
    unit: Unit
    default_text: str
    meaning: str
    minimum: float = 0.0
    maximum: float = float("inf")
    words: tuple[str, ...] = ()

    def parse(self, value: float | str) -> float | str:
        """Return the checked value in base units. Raises ConfigError."""
        try:
            return self._parse(value)
        except ValueError as error:
            value_text = repr(value) if isinstance(value, str) else self._value_text(value)
            raise ConfigError(f"--{self.name} {value_text}: {error}") from None

    def _parse(self, value: float | str) -> float | str:
        if self.unit == "word":
            if value not in self.words:
                raise ValueError(f"expected one of {', '.join(self.words)}")
            return value
        if self.unit == "size" and isinstance(value, str):
            number: float = parse_size_argument(value)
        else:
            number = parse_seconds(value) if self.unit == "duration" else parse_threshold(value)
        if not self.minimum <= number <= self.maximum:
            raise ValueError(f"must be {self._range()}")
        return number

    def _range(self) -> str:
        maximum = "" if self.maximum == float("inf") else f" and at most {self._value_text(self.maximum)}"
        return f"at least {self._value_text(self.minimum)}{maximum}"

    def _value_text(self, value: float) -> str:
        if self.unit == "size":
            return size_text(value)
        if self.unit == "duration":
            return duration_text(value)
        return f"{100 * value:g}%" if self.unit == "fraction" else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario, which ``write`` adds to a script. ``views``: those in which it can be diagnosed. ``verdict``: the
    expected one, empty for none; ``verdict_note`` says when it is another.

    ``size_bytes``: size of the device that the plan is made for, unless an option states it.
    """

    name: str
    alias: str
    summary: str
    verdict: str
    shape: tuple[str, ...]
    write: Callable[[PlanBuilder], None] = field(repr=False)
    options: tuple[Option, ...] = ()
    views: tuple[View, ...] = VIEWS
    neighbors: bool = True
    size_bytes: int = 80 * GIB
    verdict_note: str = ""


def scenario(
    name: str, alias: str, summary: str, verdict: str, **fields: Any
) -> Callable[[Callable[[PlanBuilder], None]], Scenario]:
    """Make a scenario of the function below, which ``plan.SCENARIOS`` must list. ``fields``: those of `Scenario`."""
    return lambda write: Scenario(name, alias, summary, verdict, write=write, **fields)


QUIET_NOISE_BYTES = 32 * MIB
LOUD_NOISE_BYTES = 307 * MIB
"""0.3 GiB: standard deviation from sample to sample."""

MIN_LOUD_NOISE_BYTES = 100 * MIB
"""A series with less noise is called quiet."""

WANDER_BYTES = 512 * MIB
WANDER_SECONDS = 10 * MINUTE_SECONDS
"""Slow random changes of a noisy program's load: standard deviation, and correlation time."""


def draw_noise(builder: PlanBuilder) -> float:
    """Draw quiet or noisy, with equal probability."""
    drawn = QUIET_NOISE_BYTES if builder.rng.random() < 0.5 else LOUD_NOISE_BYTES
    return builder.choose_number("noise", drawn)


def start_program(
    builder: PlanBuilder, share: tuple[float, float] = (0.15, 0.4), noise_bytes: float | None = None
) -> float:
    """Start program 0, which works to the end of the plan. Returns the end of its warm-up.

    ``share``: bounds of its permanent memory, as parts of the device.
    """
    noise_bytes = draw_noise(builder) if noise_bytes is None else noise_bytes
    program = builder.program("load")
    lasting = builder.rng.uniform(*share) * builder.size_bytes
    ready = builder.fill(1.0, lasting, builder.rng.uniform(20.0, 120.0))
    work(builder, ready, builder.duration, program, noise_bytes)
    return ready


def work(builder: PlanBuilder, start: float, end: float, program: int, noise_bytes: float) -> None:
    """A working set around 2 GiB and a utilization, both with noise.

    Half of the noisy programs release freed memory to the device, so the driver's reading decreases, too.
    """
    rng, pulse = (builder.random(f"{what} of {program} at {start:.3f}") for what in ("memory", "utilization"))
    noisy = noise_bytes >= MIN_LOUD_NOISE_BYTES
    returning, utilization = noisy and pulse.random() < 0.5, pulse.uniform(0.5, 0.9)
    level = VaryingAmount(builder, 128 * MIB if noisy else 16 * MIB, program)
    wander = RandomWalk(rng, WANDER_BYTES if noisy else 0.0, WANDER_SECONDS)
    period = 1.0 if noisy else 5.0
    for at in every(start, end, period):
        level.resize(at, 2 * GIB + wander.value_after(period) + rng.gauss(0.0, noise_bytes))
    for at in every(start, end, 10.0):
        builder.busy(at, utilization + pulse.uniform(-0.08, 0.08), program)
        if returning:
            builder.flush(at, program)


class RandomWalk:
    """An Ornstein-Uhlenbeck process with mean 0."""

    def __init__(self, rng: Random, deviation: float, seconds: float) -> None:
        self._rng, self._deviation, self._seconds = rng, deviation, seconds
        self._value = rng.gauss(0.0, deviation)

    def value_after(self, seconds: float) -> float:
        correlation = math.exp(-seconds / self._seconds)
        self._value = correlation * self._value + math.sqrt(1 - correlation * correlation) * self._rng.gauss(
            0.0, self._deviation
        )
        return self._value
