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
    ProgramScript,
    Scenario,
    Script,
    ScriptStep,
    View,
)

COMMON = (
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

TABLE = (
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

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in TABLE}

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
    programs: tuple[ProgramScript, ...]
    steps: tuple[ScriptStep, ...]
    observation: Observation
    truth: ExpectedVerdict
    peak_bytes: int
    given: tuple[tuple[str, float | str], ...]

    def steps_of(self, program: int) -> tuple[ScriptStep, ...]:
        return tuple(step for step in self.steps if step.program == program)

    def without_fault(self) -> LoadPlan | None:
        """The same plan without the injected problem; None if there is none."""
        if not self.truth.kind:
            return None
        return _make(SCENARIOS[self.scenario], self.seed, dict(self.given), inject=False)


def plan(scenario: str, seed: int = 0, **options: float | str) -> LoadPlan:
    """Make a plan. ``scenario`` is a name or an alias; options are text or numbers in base units.

    Raises ConfigError.
    """
    chosen = find_scenario(scenario)
    return _make(chosen, seed, checked_options(chosen, options), inject=True)


def _make(scenario: Scenario, seed: int, given: Mapping[str, float | str], inject: bool) -> LoadPlan:
    script = Script(scenario.name, seed, {"size": scenario.size_bytes, **given}, inject)
    scenario.write(script)
    observation = _observe(script, scenario, seed)
    steps = sorted((step for step in script.steps if step.at < script.duration), key=itemgetter(0))
    walked = simulate(steps, script)
    end = script.duration
    if inject and walked.oom_at is not None:
        end = min(end, walked.oom_at + AFTERMATH_SECONDS)
    return LoadPlan(
        scenario=scenario.name,
        seed=seed,
        options=tuple(sorted(script.chosen_options.items())),
        size_bytes=script.size_bytes,
        duration_seconds=end,
        programs=tuple(script.programs),
        steps=tuple(step for step in walked.steps if step.at < end),
        observation=observation,
        truth=_complete(script, walked),
        peak_bytes=walked.peak_bytes,
        given=tuple(given.items()),
    )


def _observe(script: Script, scenario: Scenario, seed: int) -> Observation:
    """Draw the conditions of the observation: noise, gaps, and other programs on the device."""
    rng = script.random("observation")
    gaps, neighbors = float(rng.random() < 0.5), float(rng.random() < 0.5 and scenario.neighbors)
    outages: tuple[tuple[float, float], ...] = ()
    if script.choose_number("gaps", gaps) and script.duration >= 5 * HOUR_SECONDS:
        outages = ((rng.uniform(0.3, 0.8) * script.duration, rng.uniform(30.0, 60.0) * MINUTE_SECONDS),)
    if script.choose_number("neighbors", neighbors):
        _neighbors(script)
    view = script.choose_word("view", scenario.views[seed % len(scenario.views)])
    views: dict[str, View] = {"agent": "agent", "process": "process", "device": "device"}
    return Observation(views[view], int(script.choose_number("noise")), bool(script.choose_number("gaps")), outages)


def _neighbors(script: Script) -> None:
    rng = script.random("neighbours")
    at = rng.expovariate(1 / (40 * MINUTE_SECONDS))
    while at < script.duration:
        ends = at + rng.uniform(5.0, 30.0) * MINUTE_SECONDS
        program = script.program(f"neighbor-{len(script.programs)}", at, agent=False)
        script.fill(at + 1.0, rng.uniform(1.0, 4.0) * GIB, 5.0, program, pieces=4)
        script.end(ends, program=program)
        at = ends + rng.expovariate(1 / (40 * MINUTE_SECONDS))


def _complete(script: Script, walked: SimulatedRun) -> ExpectedVerdict:
    """Complete the truth about a leak from the simulation, up to the plan's end."""
    truth = script.truth
    if truth.injected_at is not None and truth.injected_at >= script.duration:
        return ExpectedVerdict()
    if truth.kind != "leak" or truth.injected_at is None:
        return truth
    ends_at = script.duration if walked.oom_at is None else walked.oom_at
    slope = truth.slope_bytes_per_second
    if slope is None:
        slope = LeakedBytes(script.kept).until(ends_at) / (ends_at - truth.injected_at)
    oom_at = walked.oom_at
    if oom_at is None and slope > 0:
        oom_at = max(ends_at, truth.injected_at + (script.size_bytes - walked.peak_without_leak_bytes) / slope)
    return replace(truth, ends_at=ends_at, slope_bytes_per_second=slope, oom_at=oom_at)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    steps: list[ScriptStep]
    """Steps, without those of programs that have ended."""
    oom_at: float | None
    peak_bytes: int
    peak_without_leak_bytes: float
    """Peak of program 0 after the onset of a leak, minus the leaked bytes at that time."""


def simulate(steps: Iterable[ScriptStep], script: Script) -> SimulatedRun:
    """Simulate ``steps`` in order of time. A program ends when the device is full."""
    devices = [program.device for program in script.programs]
    used = [0] * (max(devices) + 1)
    held: list[dict[int, int]] = [{} for _ in devices]
    sums, running = [0] * len(devices), [False] * len(devices)
    peak, without_leak, oom_at = 0, 0.0, None
    onset = script.truth.injected_at
    rest, kept = LeakedBytes(script.kept), 0.0
    executed: list[ScriptStep] = []
    for step in steps:
        at, action, program, block, size, _, _ = step
        if action == "start":
            running[program] = True
            size = CONTEXT_BYTES
        if not running[program]:
            continue
        executed.append(step)
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
                without_leak = max(without_leak, sums[0] - kept)
    return SimulatedRun(executed, oom_at, peak, without_leak)


class LeakedBytes:
    """Cumulative bytes of a leak at a time. Times must not decrease."""

    def __init__(self, kept: Sequence[tuple[float, float]]) -> None:
        self._rest, self._sum = sorted(kept, reverse=True), 0.0

    def until(self, at: float) -> float:
        while self._rest and self._rest[-1][0] <= at:
            self._sum += self._rest.pop()[1]
        return self._sum


def find_scenario(name: str) -> Scenario:
    """Return a scenario by name or alias (p1 to p10, n1 to n11). Raises ConfigError."""
    for one in TABLE:
        if name in (one.name, one.alias) and name:
            return one
    raise ConfigError(f"no scenario is named {name!r}; `gpumond loadgen --list` shows all scenarios")


def checked_options(scenario: Scenario, given: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the options in base units. Raises ConfigError for an unknown option or an invalid value."""
    known = {option.name: option for option in (*scenario.options, *COMMON)}
    own = list_text([f"--{option.name}" for option in scenario.options] or ["none"])
    for name in given:
        if name not in known:
            raise ConfigError(f"--{name}: the scenario {scenario.name} doesn't have this option; its options: {own}")
    return {name: known[name].value(value) for name, value in given.items()}
