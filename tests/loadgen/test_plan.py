"""Plans of the load generator: their steps, and the agreement of their truth with the steps."""

from __future__ import annotations

import hashlib
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import NamedTuple

import pytest

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.plan import SCENARIOS, LoadPlan, plan
from gpumond.features.loadgen.scenario_builder import CONTEXT_BYTES, ExpectedVerdict, PlanStep

LEAKS = [name for name, scenario in SCENARIOS.items() if scenario.verdict == "leak"]
INJECTED = [name for name, scenario in SCENARIOS.items() if scenario.verdict and name != "stress"]
HEALTHY = [name for name, scenario in SCENARIOS.items() if not scenario.verdict]
SERVING = ["serving-bimodal", "serving-nightly", "model-loads", "slow-fragmentation"]
SHORT = {"duration": "1h"}


class Sample(NamedTuple):
    at: float
    live_bytes: int


def curve(planned: LoadPlan, program: int = 0) -> list[Sample]:
    """Yield the live bytes of the program after each of its steps."""
    sizes: dict[int, int] = {}
    live, samples = 0, []
    for step in planned.steps_of(program):
        if step.action in ("take", "take-outside"):
            sizes[step.block] = step.size_bytes
            live += step.size_bytes
        elif step.action == "give":
            live -= sizes.pop(step.block)
        elif step.action == "end":
            sizes, live = {}, 0
        samples.append(Sample(step.at, live))
    return samples


def floor(samples: Sequence[Sample], start: float, seconds: float) -> int:
    return min(live for at, live in samples if start <= at < start + seconds)


def test_scenarios_have_a_number_or_are_drills():
    aliases = {scenario.alias for scenario in SCENARIOS.values()} - {""}
    assert aliases == {f"p{n}" for n in range(1, 11)} | {f"n{n}" for n in range(1, 12)}
    assert {name for name, scenario in SCENARIOS.items() if not scenario.alias} == {"steady", "stress", "flush-storm"}
    assert plan("p2", 3) == plan("leak-linear", 3)


@pytest.mark.parametrize("name", SCENARIOS)
def test_seed_determines_the_plan(name: str):
    own = plan(name, 7, **SHORT)
    assert plan(name, 7, **SHORT) == own
    others = [replace(plan(name, seed, **SHORT), seed=7) for seed in (8, 9)]
    assert own not in others[:1] or own not in others[1:]


@pytest.mark.parametrize(("name", "digest"), [("leak-load", "07506a78d08b8a10"), ("leak-linear", "63a03c166af9057c")])
def test_plan_is_equal_in_all_versions_of_python(name: str, digest: str):
    planned = plan(name, 5, duration="1h")
    text = "\n".join(f"{s.at:.6f} {s.action} {s.program} {s.block} {s.size_bytes} {s.ratio:.6f}" for s in planned.steps)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_are_in_order_and_free_each_block_once(name: str):
    planned = plan(name, 2, **SHORT)
    assert [step.at for step in planned.steps] == sorted(step.at for step in planned.steps)
    assert planned.steps[-1].at < planned.duration_seconds
    live: dict[int, set[int]] = {}
    for step in planned.steps:
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
def test_peak_is_that_of_the_steps_and_fits_the_device(name: str, seed: int):
    planned = plan(name, seed)
    assert planned.peak_bytes + CONTEXT_BYTES <= planned.size_bytes
    reached = [live for _, live in curve(planned) if live + CONTEXT_BYTES <= planned.size_bytes]
    assert max(reached) == planned.peak_bytes


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(6))
def test_device_never_fills_in_healthy_scenarios(name: str, seed: int):
    planned = plan(name, seed)
    assert planned.expected_verdict == ExpectedVerdict()
    assert planned.without_fault() is None
    assert planned.peak_bytes + CONTEXT_BYTES < 0.95 * planned.size_bytes


@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("seed", range(4))
def test_leak_has_the_slope_of_its_truth(name: str, seed: int):
    """Compared with the twin, which has the same noise and no leak."""
    planned = plan(name, seed)
    verdict, twin = planned.expected_verdict, planned.without_fault()
    assert twin is not None
    assert verdict.kind == "leak"
    assert verdict.injected_at is not None
    assert verdict.ends_at is not None
    assert verdict.slope_bytes_per_second is not None
    end = min(verdict.ends_at, planned.duration_seconds)
    window = 0.3 * (end - verdict.injected_at)
    ours, theirs = curve(planned), curve(twin)
    grown = floor(ours, end - window, window) - floor(ours, verdict.injected_at - 120, 120)
    grown -= floor(theirs, end - window, window) - floor(theirs, verdict.injected_at - 120, 120)
    expected = verdict.slope_bytes_per_second * (end - window - verdict.injected_at)
    if name == "leak-linear":
        assert grown == pytest.approx(expected, rel=0.05, abs=512 * MIB)
    else:
        assert grown == pytest.approx(expected, rel=0.35, abs=2 * GIB)


@pytest.mark.parametrize("seed", range(6))
def test_linear_leak_fills_the_device_at_the_time_of_its_truth(seed: int):
    planned = plan("leak-linear", seed, rate="128MiB", duration="30h", noise="32MiB", neighbors=0)
    assert planned.expected_verdict.oom_at is not None
    assert planned.expected_verdict.injected_at is not None
    assert planned.duration_seconds == planned.expected_verdict.oom_at + 5 * MINUTE_SECONDS
    short = plan("leak-linear", seed, rate="128MiB", duration="3h", noise="32MiB", neighbors=0)
    assert short.expected_verdict.oom_at == pytest.approx(planned.expected_verdict.oom_at, rel=0.01)


@pytest.mark.parametrize("name", INJECTED)
def test_twin_differs_only_by_the_injection(name: str):
    planned = plan(name, 3)
    twin = planned.without_fault()
    assert twin is not None
    assert twin.expected_verdict == ExpectedVerdict()
    assert planned.expected_verdict.injected_at is not None
    before = (
        planned.expected_verdict.injected_at - 5 * MINUTE_SECONDS
        if name in ("crash", "leak-at-eval")
        else planned.expected_verdict.injected_at
    )
    ours = [unnumbered(step) for step in planned.steps if step.at < before]
    theirs = [unnumbered(step) for step in twin.steps if step.at < before]
    assert ours == theirs
    assert [step for step in planned.steps if step.at >= before] != [step for step in twin.steps if step.at >= before]
    assert (twin.observation, twin.programs, twin.options) == (planned.observation, planned.programs, planned.options)


def unnumbered(step: PlanStep) -> PlanStep:
    """Blocks are numbered as they are written, including the injected ones."""
    return step._replace(block=0)


def test_fragmentation_has_constant_live_bytes():
    planned = plan("fragmentation", 1, neighbors=0)
    assert planned.expected_verdict.injected_at is not None
    samples = curve(planned)
    peaks = [
        max(live for at, live in samples if start <= at < start + 600)
        for start in range(int(planned.expected_verdict.injected_at), int(planned.duration_seconds) - 600, 600)
    ]
    assert max(peaks) < 1.02 * min(peaks)


@pytest.mark.parametrize("name", SERVING)
def test_serving_program_leaks_at_the_given_rate(name: str):
    healthy, planned = plan(name, 1), plan(name, 1, rate="64MiB")
    twin = planned.without_fault()
    assert twin is not None
    assert twin.steps == healthy.steps
    assert (planned.expected_verdict.kind, planned.expected_verdict.form) == ("leak", "linear")
    assert planned.expected_verdict.slope_bytes_per_second == pytest.approx(64 * MIB / 60)
    assert planned.expected_verdict.injected_at is not None
    assert 4 * HOUR_SECONDS <= planned.expected_verdict.injected_at <= 10 * HOUR_SECONDS
    assert planned.size_bytes == 48 * GIB


def samples(planned: LoadPlan) -> list[int]:
    """Return the live bytes of program 0 every 57 s after its start."""
    known = curve(planned)
    times = [at for at, _ in known]
    return [known[bisect_right(times, at) - 1].live_bytes for at in range(57, int(planned.duration_seconds), 57)]


@pytest.mark.parametrize("name", ["serving-bimodal", "serving-nightly"])
def test_serving_program_has_the_levels_of_the_fleet(name: str):
    found = [live for seed in range(4) for live in samples(plan(name, seed))]
    changes = [abs(after - before) for before, after in pairwise(found)]
    twentieths = statistics.quantiles(found, n=20)
    assert 13 * GIB < twentieths[0] < 17 * GIB
    assert 20.5 * GIB < twentieths[9] < 24 * GIB
    assert 23.5 * GIB < twentieths[18] < 32 * GIB
    assert 0.45 < sum(change == 0 for change in changes) / len(changes) < 0.65
    assert 9 * GIB < statistics.quantiles(changes, n=100)[98] < 15 * GIB


def test_nightly_program_rests_at_night():
    for seed in range(4):
        busy = [step.ratio > 0.4 for step in plan("serving-nightly", seed).steps if step.action == "busy"]
        hours = [sum(busy[at : at + 720]) / 720 for at in range(0, len(busy) - 720, 120)]
        assert max(hours) > 0.6
        assert min(hours) < 0.2


def test_models_stay_for_tens_of_minutes():
    stays = []
    for seed in range(8):
        found = samples(plan("model-loads", seed))
        stays += [57 * len(list(same)) for _, same in groupby(found)]
    long = [stay for stay in stays if stay > 10 * MINUTE_SECONDS]
    assert len(long) > 8 * 8
    assert 25 * MINUTE_SECONDS < statistics.median(long) < 70 * MINUTE_SECONDS


@pytest.mark.parametrize(("times", "kind"), [(1, "crash"), (2, "crash"), (3, "crash-loop")])
def test_three_crashes_are_a_crash_loop(times: int, kind: str):
    planned = plan("crash", 4, times=times)
    assert planned.expected_verdict.kind == kind
    deaths = [step.at for step in planned.steps if step.ending == "crash" and step.action == "end"]
    assert len(deaths) == times
    assert deaths[min(times, 3) - 1 if times >= 3 else 0] == planned.expected_verdict.injected_at
    if times >= 3:
        assert deaths[2] - deaths[0] < HOUR_SECONDS


@pytest.mark.parametrize("name", INJECTED)
def test_injection_after_the_end_is_not_in_the_truth(name: str):
    planned = plan(name, 0, duration="4m", times=1) if name == "crash" else plan(name, 0, duration="4m")
    assert planned.expected_verdict == ExpectedVerdict()


@pytest.mark.parametrize(("fill", "kind"), [("90%", ""), ("98%", "pressure")])
def test_nearly_full_device_is_under_pressure(fill: str, kind: str):
    assert plan("stress", fill=fill).expected_verdict.kind == kind


def test_views_alternate_by_seed_unless_the_scenario_needs_an_agent():
    assert [plan("leak-linear", seed, **SHORT).observation.view for seed in range(3)] == ["agent", "process", "device"]
    assert {plan("fragmentation", seed).observation.view for seed in range(4)} == {"agent"}
    assert plan("steady", 0, view="device").observation.view == "device"


@pytest.mark.parametrize(
    ("scenario", "options", "message"),
    [
        ("leek", {}, "no scenario is named 'leek'; to list all scenarios: gpumond loadgen --list"),
        ("", {}, "no scenario is named ''"),
        ("steady", {"rate": 3}, "--rate: the scenario steady doesn't have this option; its options: none"),
        ("p2", {"rates": 3}, "its options: --rate"),
        ("p2", {"rate": "fast"}, "--rate 'fast': expected a size such as 80GiB"),
        ("p2", {"rate": 0}, "--rate 0 B: must be at least 1 B"),
        ("p2", {"duration": "soon"}, "--duration 'soon': expected a duration such as 30s"),
        ("p6", {"share": "90%"}, "--share '90%': must be at least 5% and at most 50%"),
        ("p5", {"where": "here"}, "--where 'here': expected one of pool, outside"),
        ("p2", {"view": "all"}, "expected one of agent, process, device"),
    ],
)
def test_invalid_option_is_named_with_the_expected_values(scenario: str, options: dict[str, float | str], message: str):
    with pytest.raises(ConfigError) as refused:
        plan(scenario, 0, **options)
    assert message in str(refused.value)


def test_options_accept_sizes_and_durations_with_units():
    assert plan("p2", 1, rate="32MiB", duration="2h") == plan("p2", 1, rate=32 * MIB, duration=7200)
    assert plan("p2", 1, rate="32MiB").expected_verdict.slope_bytes_per_second == pytest.approx(32 * MIB / 60)
