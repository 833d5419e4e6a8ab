"""Plans: what is done when, and whether what they say of themselves is so."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import NamedTuple

import pytest

from gpumond.errors import ConfigError
from gpumond.loadgen import SCENARIOS, Plan, Truth, plan
from gpumond.loadgen.script import CONTEXT_BYTES, HOUR, MINUTE, ScriptStep
from gpumond.model.units import GIB, MIB

LEAKS = [name for name, scenario in SCENARIOS.items() if scenario.verdict == "leak"]
INJECTED = [name for name, scenario in SCENARIOS.items() if scenario.verdict and name != "stress"]
NOTHING_WRONG = [name for name, scenario in SCENARIOS.items() if not scenario.verdict]
SHORT = {"duration": "2h"}


class Moment(NamedTuple):
    at: float
    live_bytes: int


def curve(made: Plan, program: int = 0) -> list[Moment]:
    """Yield the live bytes of the program after each of its steps."""
    sizes: dict[int, int] = {}
    live, moments = 0, []
    for step in made.steps_of(program):
        if step.action in ("take", "take-outside"):
            sizes[step.block] = step.size_bytes
            live += step.size_bytes
        elif step.action == "give":
            live -= sizes.pop(step.block)
        elif step.action == "end":
            sizes, live = {}, 0
        moments.append(Moment(step.at, live))
    return moments


def floor(made: Plan, start: float, seconds: float) -> int:
    return min(live for at, live in curve(made) if start <= at < start + seconds)


def test_every_scenario_has_a_number_or_is_a_drill():
    aliases = {scenario.alias for scenario in SCENARIOS.values()} - {""}
    assert aliases == {f"p{n}" for n in range(1, 10)} | {f"n{n}" for n in range(1, 8)}
    assert {name for name, scenario in SCENARIOS.items() if not scenario.alias} == {"steady", "stress", "flush-storm"}
    assert plan("p2", 3) == plan("leak-linear", 3)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_seed_decides_everything(name: str):
    assert plan(name, 7, **SHORT) == plan(name, 7, **SHORT)
    others = [replace(plan(name, seed, **SHORT), seed=7) for seed in (8, 9)]
    assert plan(name, 7, **SHORT) not in others[:1] or plan(name, 7, **SHORT) not in others[1:]


def test_a_plan_is_the_same_in_every_version_of_python():
    made = plan("leak-load", 5, duration="1h")
    text = "\n".join(f"{s.at:.6f} {s.action} {s.program} {s.block} {s.size_bytes} {s.ratio:.6f}" for s in made.steps)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "16ec364334f4722b"


@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_are_in_order_and_every_block_is_given_once_after_it_was_taken(name: str):
    made = plan(name, 2, **SHORT)
    assert [step.at for step in made.steps] == sorted(step.at for step in made.steps)
    assert made.steps[-1].at < made.duration_seconds
    live: dict[int, set[int]] = {}
    for step in made.steps:
        blocks = live.setdefault(step.program, set())
        if step.action in ("take", "take-outside"):
            assert step.block not in blocks
            assert step.size_bytes > 0
            blocks.add(step.block)
        elif step.action == "give":
            blocks.remove(step.block)
        elif step.action == "end":
            blocks.clear()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_peak_is_what_the_steps_reach_and_fits_the_card(name: str, seed: int):
    made = plan(name, seed)
    assert made.peak_bytes + CONTEXT_BYTES <= made.size_bytes
    reached = [live for _, live in curve(made) if live + CONTEXT_BYTES <= made.size_bytes]
    assert max(reached) == made.peak_bytes


@pytest.mark.parametrize("name", NOTHING_WRONG)
@pytest.mark.parametrize("seed", range(6))
def test_device_never_fills_in_healthy_scenarios(name: str, seed: int):
    made = plan(name, seed)
    assert made.truth == Truth()
    assert made.twin() is None
    assert made.peak_bytes + CONTEXT_BYTES < 0.95 * made.size_bytes


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("seed", range(4))
def test_a_leak_is_as_steep_as_its_truth_says(name: str, seed: int):
    """Measured against the twin, which has the same noise and no leak."""
    made = plan(name, seed)
    truth, twin = made.truth, made.twin()
    assert twin is not None
    assert truth.kind == "leak"
    assert truth.injected_at is not None
    assert truth.ends_at is not None
    assert truth.slope_bytes_per_second is not None
    end = min(truth.ends_at, made.duration_seconds)
    window = 0.3 * (end - truth.injected_at)
    grown = floor(made, end - window, window) - floor(made, truth.injected_at - 120, 120)
    grown -= floor(twin, end - window, window) - floor(twin, truth.injected_at - 120, 120)
    expected = truth.slope_bytes_per_second * (end - window - truth.injected_at)
    if name == "leak-linear":
        assert grown == pytest.approx(expected, rel=0.05, abs=512 * MIB)
    else:
        assert grown == pytest.approx(expected, rel=0.35, abs=2 * GIB)


@pytest.mark.parametrize("seed", range(6))
def test_a_linear_leak_fills_the_card_when_its_truth_says(seed: int):
    made = plan("leak-linear", seed, rate="128MiB", duration="30h", noise="32MiB", neighbours=0)
    assert made.truth.oom_at is not None
    assert made.truth.injected_at is not None
    assert made.duration_seconds == made.truth.oom_at + 5 * MINUTE
    short = plan("leak-linear", seed, rate="128MiB", duration="3h", noise="32MiB", neighbours=0)
    assert short.truth.oom_at == pytest.approx(made.truth.oom_at, rel=0.01)


@pytest.mark.parametrize("name", INJECTED)
def test_a_twin_is_the_same_but_for_the_injection(name: str):
    made = plan(name, 3)
    twin = made.twin()
    assert twin is not None
    assert twin.truth == Truth()
    assert made.truth.injected_at is not None
    before = made.truth.injected_at - 5 * MINUTE if name in ("crash", "leak-at-eval") else made.truth.injected_at
    ours = [unnumbered(step) for step in made.steps if step.at < before]
    theirs = [unnumbered(step) for step in twin.steps if step.at < before]
    assert ours == theirs
    assert [step for step in made.steps if step.at >= before] != [step for step in twin.steps if step.at >= before]
    assert (twin.observation, twin.programs, twin.options) == (made.observation, made.programs, made.options)


def unnumbered(step: ScriptStep) -> ScriptStep:
    """Blocks are numbered as they are written, the injected ones among them."""
    return step._replace(block=0)


def test_fragmentation_holds_as_much_live_as_ever():
    made = plan("fragmentation", 1, neighbours=0)
    assert made.truth.injected_at is not None
    peaks = [
        max(live for at, live in curve(made) if start <= at < start + 600)
        for start in range(int(made.truth.injected_at), int(made.duration_seconds) - 600, 600)
    ]
    assert max(peaks) < 1.02 * min(peaks)


@pytest.mark.parametrize(("times", "kind"), [(1, "crash"), (2, "crash"), (3, "crash-loop")])
def test_three_deaths_make_a_crash_loop(times: int, kind: str):
    made = plan("crash", 4, times=times)
    assert made.truth.kind == kind
    deaths = [step.at for step in made.steps if step.ending == "crash" and step.action == "end"]
    assert len(deaths) == times
    assert deaths[min(times, 3) - 1 if times >= 3 else 0] == made.truth.injected_at
    if times >= 3:
        assert deaths[2] - deaths[0] < HOUR


@pytest.mark.parametrize("name", INJECTED)
def test_injection_after_the_end_is_not_in_the_truth(name: str):
    made = plan(name, 0, duration="4m", times=1) if name == "crash" else plan(name, 0, duration="4m")
    assert made.truth == Truth()


@pytest.mark.parametrize(("fill", "kind"), [("90%", ""), ("98%", "pressure")])
def test_a_card_that_is_nearly_all_used_is_under_pressure(fill: str, kind: str):
    assert plan("stress", fill=fill).truth.kind == kind


def test_views_take_turns_and_only_where_they_can_tell():
    assert [plan("leak-linear", seed, **SHORT).observation.view for seed in range(3)] == ["agent", "process", "device"]
    assert {plan("fragmentation", seed).observation.view for seed in range(4)} == {"agent"}
    assert plan("steady", 0, view="device").observation.view == "device"


@pytest.mark.parametrize(
    ("scenario", "options", "said"),
    [
        ("leek", {}, "no scenario is named 'leek'; `gpumond load --list`"),
        ("", {}, "no scenario is named ''"),
        ("steady", {"rate": 3}, "option --rate: steady has no such option; it has no options"),
        ("p2", {"rates": 3}, "it has --rate"),
        ("p2", {"rate": "fast"}, "option --rate 'fast': expected a number, a share such as 80% or a size such as 1GiB"),
        ("p2", {"rate": 0}, "option --rate 0: expected a size of at least 1, such as 32MiB"),
        ("p2", {"duration": "soon"}, "option --duration 'soon': expected a duration such as 30s"),
        ("p6", {"share": "90%"}, "option --share '90%': expected a share of at least 0.05 and at most 0.5"),
        ("p5", {"where": "here"}, "option --where 'here': expected one of pool, outside"),
        ("p2", {"view": "all"}, "expected one of agent, process, device"),
    ],
)
def test_a_bad_option_is_said_with_the_mend(scenario: str, options: dict[str, float | str], said: str):
    with pytest.raises(ConfigError) as refused:
        plan(scenario, 0, **options)
    assert said in str(refused.value)


def test_an_option_as_people_write_it_is_the_number_that_it_means():
    assert plan("p2", 1, rate="32MiB", duration="2h") == plan("p2", 1, rate=32 * MIB, duration=7200)
    assert plan("p2", 1, rate="32MiB").truth.slope_bytes_per_second == pytest.approx(32 * MIB / 60)
