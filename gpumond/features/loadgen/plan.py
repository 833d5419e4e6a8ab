"""Plans from a scenario and a seed: the steps with their times, and the expected verdict. No I/O.

The same scenario, seed and options give the same plan, in every version of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import GIB, HOUR_SECONDS, MINUTE_SECONDS, list_text
from gpumond.features.loadgen import scenarios
from gpumond.features.loadgen.scenario_builder import (
    CONTEXT_BYTES,
    VIEWS,
    ExpectedVerdict,
    Observation,
    Option,
    PlanBuilder,
    PlannedProgram,
    PlanStep,
    Scenario,
    View,
)

COMMON_OPTIONS = (
    Option(
        "size",
        "size",
        "80GiB, for serving 48GiB",
        "size of the GPU that the scenario is made for; backends scale the load to their GPU",
        64 << 30,
    ),
    Option("duration", "duration", "three times the time allowed for detection", "length of the scenario", 1.0, 172800),
    Option("view", "word", "random", f"what is observed in virtual time: {', '.join(VIEWS)}", words=VIEWS),
    Option("noise", "size", "32 MiB or 0.3 GiB", "standard deviation of the noise"),
    Option("gaps", "number", "0 or 1", "1: some samples are missing", 0, 1),
    Option("neighbors", "number", "0 or 1", "1: other programs start and end on the GPU", 0, 1),
    Option("programs", "number", "4", "fleet: number of programs, each on its own GPU; backends run the first", 1, 64),
)

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        scenarios.per_epoch,
        scenarios.linear,
        scenarios.under_load,
        scenarios.irregular,
        scenarios.compile_cache,
        scenarios.fragmentation,
        scenarios.orphan,
        scenarios.crash,
        scenarios.at_evaluation,
        scenarios.leak_serving,
        scenarios.warm_up,
        scenarios.autotune,
        scenarios.preallocated,
        scenarios.saturating_cache,
        scenarios.periodic_evaluation,
        scenarios.curriculum,
        scenarios.fleet,
        scenarios.serving_bimodal,
        scenarios.serving_nightly,
        scenarios.model_loads,
        scenarios.slow_fragmentation,
        scenarios.steady,
        scenarios.stress,
        scenarios.flush_storm,
    )
}

AFTERMATH_SECONDS = 5 * MINUTE_SECONDS
"""Seconds for which a plan continues after its program has died of an out-of-memory error."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The steps and their truth. ``options``: all options, given or drawn; ``peak_bytes``: peak live of program 0."""

    scenario: str
    seed: int
    options: tuple[tuple[str, float | str], ...]
    size_bytes: int
    duration_seconds: float
    programs: tuple[PlannedProgram, ...]
    steps: tuple[PlanStep, ...]
    observation: Observation
    expected_verdict: ExpectedVerdict
    peak_bytes: int
    given_options: tuple[tuple[str, float | str], ...]

    def steps_of(self, program: int) -> tuple[PlanStep, ...]:
        return tuple(step for step in self.steps if step.program == program)

    def without_fault(self) -> LoadPlan | None:
        """The same plan without the injected problem; None if there is none."""
        if not self.expected_verdict.kind:
            return None
        return _make(SCENARIOS[self.scenario], self.seed, dict(self.given_options), inject=False)


def plan(scenario: str, seed: int = 0, **options: float | str) -> LoadPlan:
    """Make a plan. ``scenario`` is a name or an alias; options are text or numbers in base units.

    Raises ConfigError.
    """
    found = find_scenario(scenario)
    return _make(found, seed, checked_options(found, options), inject=True)


def _make(scenario: Scenario, seed: int, given_options: Mapping[str, float | str], inject: bool) -> LoadPlan:
    builder = PlanBuilder(scenario.name, seed, {"size": scenario.size_bytes, **given_options}, inject)
    scenario.write(builder)
    observation = _observe(builder, scenario, seed)
    steps = sorted((step for step in builder.steps if step.at < builder.duration), key=itemgetter(0))
    simulated = simulate(steps, builder)
    end = builder.duration
    if inject and simulated.oom_at is not None:
        end = min(end, simulated.oom_at + AFTERMATH_SECONDS)
    return LoadPlan(
        scenario=scenario.name,
        seed=seed,
        options=tuple(sorted(builder.chosen_options.items())),
        size_bytes=builder.size_bytes,
        duration_seconds=end,
        programs=tuple(builder.programs),
        steps=tuple(step for step in simulated.steps if step.at < end),
        observation=observation,
        expected_verdict=_completed_verdict(builder, simulated),
        peak_bytes=simulated.peak_bytes,
        given_options=tuple(given_options.items()),
    )


def _observe(builder: PlanBuilder, scenario: Scenario, seed: int) -> Observation:
    """Draw the conditions of the observation: noise, gaps, and other programs on the device."""
    rng = builder.random("observation")
    gaps, neighbors = float(rng.random() < 0.5), float(rng.random() < 0.5 and scenario.neighbors)
    outages: tuple[tuple[float, float], ...] = ()
    if builder.choose_number("gaps", gaps) and builder.duration >= 5 * HOUR_SECONDS:
        outages = ((rng.uniform(0.3, 0.8) * builder.duration, rng.uniform(30.0, 60.0) * MINUTE_SECONDS),)
    if builder.choose_number("neighbors", neighbors):
        _neighbors(builder)
    view = builder.choose_word("view", scenario.views[seed % len(scenario.views)])
    views: dict[str, View] = {"agent": "agent", "process": "process", "device": "device"}
    return Observation(views[view], int(builder.choose_number("noise")), bool(builder.choose_number("gaps")), outages)


def _neighbors(builder: PlanBuilder) -> None:
    rng = builder.random("neighbours")
    at = rng.expovariate(1 / (40 * MINUTE_SECONDS))
    while at < builder.duration:
        end = at + rng.uniform(5.0, 30.0) * MINUTE_SECONDS
        program = builder.program(f"neighbor-{len(builder.programs)}", at, agent=False)
        builder.fill(at + 1.0, rng.uniform(1.0, 4.0) * GIB, 5.0, program, pieces=4)
        builder.end(end, program=program)
        at = end + rng.expovariate(1 / (40 * MINUTE_SECONDS))


def _completed_verdict(builder: PlanBuilder, simulated: SimulatedRun) -> ExpectedVerdict:
    """Complete the truth about a leak from the simulation, up to the plan's end."""
    expected_verdict = builder.expected_verdict
    if expected_verdict.injected_at is not None and expected_verdict.injected_at >= builder.duration:
        return ExpectedVerdict()
    if expected_verdict.kind != "leak" or expected_verdict.injected_at is None:
        return expected_verdict
    ends_at = builder.duration if simulated.oom_at is None else simulated.oom_at
    slope = expected_verdict.slope_bytes_per_second
    if slope is None:
        slope = LeakedBytes(builder.leaked).until(ends_at) / (ends_at - expected_verdict.injected_at)
    oom_at = simulated.oom_at
    if oom_at is None and slope > 0:
        oom_at = max(
            ends_at, expected_verdict.injected_at + (builder.size_bytes - simulated.peak_without_leak_bytes) / slope
        )
    return replace(expected_verdict, ends_at=ends_at, slope_bytes_per_second=slope, oom_at=oom_at)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    steps: list[PlanStep]
    """Steps, without those of programs that have ended."""
    oom_at: float | None
    peak_bytes: int
    peak_without_leak_bytes: float
    """Peak of program 0 after the onset of a leak, minus the leaked bytes at that time."""


def simulate(steps: Iterable[PlanStep], builder: PlanBuilder) -> SimulatedRun:
    """Simulate ``steps`` in order of time. A program ends when the device is full."""
    devices = [program.device for program in builder.programs]
    used = [0] * (max(devices) + 1)
    blocks: list[dict[int, int]] = [{} for _ in devices]
    used_by_program, is_running = [0] * len(devices), [False] * len(devices)
    peak, without_leak, oom_at = 0, 0.0, None
    onset = builder.expected_verdict.injected_at
    leaked_bytes, leaked = LeakedBytes(builder.leaked), 0.0
    executed: list[PlanStep] = []
    for step in steps:
        at, action, program, block, size, _, _ = step
        if action == "start":
            is_running[program] = True
            size = CONTEXT_BYTES
        if not is_running[program]:
            continue
        executed.append(step)
        if action in ("start", "take", "take-outside"):
            if used[devices[program]] + size > builder.size_bytes:
                if program == 0 and oom_at is None:
                    oom_at = at
                action = "end"
            else:
                blocks[program][block] = size
                used_by_program[program] += size
                used[devices[program]] += size
        elif action == "give":
            size = blocks[program].pop(block)
            used_by_program[program] -= size
            used[devices[program]] -= size
        if action == "end":
            used[devices[program]] -= used_by_program[program]
            blocks[program], used_by_program[program], is_running[program] = {}, 0, False
        if program == 0:
            peak = max(peak, used_by_program[0] - CONTEXT_BYTES)
            if onset is not None and at >= onset and oom_at is None:
                leaked = leaked_bytes.until(at)
                without_leak = max(without_leak, used_by_program[0] - leaked)
    return SimulatedRun(executed, oom_at, peak, without_leak)


class LeakedBytes:
    """Cumulative bytes of a leak at a time. Times must not decrease."""

    def __init__(self, leaked: Sequence[tuple[float, float]]) -> None:
        self._later, self._sum = sorted(leaked, reverse=True), 0.0

    def until(self, at: float) -> float:
        while self._later and self._later[-1][0] <= at:
            self._sum += self._later.pop()[1]
        return self._sum


def find_scenario(name: str) -> Scenario:
    """Return a scenario by name or alias (p1 to p10, n1 to n11). Raises ConfigError."""
    for scenario in SCENARIOS.values():
        if name in (scenario.name, scenario.alias) and name:
            return scenario
    raise ConfigError(f"no scenario is named {name!r}; to list all scenarios: gpumond loadgen --list")


def checked_options(scenario: Scenario, given_options: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the options in base units. Raises ConfigError for an unknown option or an invalid value."""
    options = {option.name: option for option in (*scenario.options, *COMMON_OPTIONS)}
    option_names = list_text([f"--{option.name}" for option in scenario.options] or ["none"])
    for name in given_options:
        if name not in options:
            raise ConfigError(
                f"--{name}: the scenario {scenario.name} doesn't have this option; its options: {option_names}"
            )
    return {name: options[name].parse(value) for name, value in given_options.items()}
