"""Verdicts on growth of minutes: ``growing``, and leaks that are evident after six minutes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest

from gpumond.facts.program import StepUsage
from gpumond.facts.snapshot import Snapshot
from tests.helpers.agents import GIB
from tests.helpers.curves import (
    MIB,
    MINUTE,
    Curve,
    at_moment,
    by_agent,
    by_process,
    each_onset,
    first,
    kinds,
    last,
    of_device,
    onsets,
    steps_of,
)
from tests.helpers.values import make_pool, make_process, make_report


def staircase(per_minute: float, onset: float = 0.0, base: float = 20 * GIB, quantum: float = 2 * MIB) -> Curve:
    """Grow by whole blocks of an allocator, as a program that keeps some memory in each of its steps."""
    return lambda at: base + per_minute * max(0.0, at / MINUTE - onset) // quantum * quantum


def seen(live: Curve, times: Iterable[float], step: Curve | None = None) -> Iterator[Snapshot]:
    """Make snapshots of a program with an agent; ``step``: the number of steps at a time."""
    for at in times:
        own = int(live(at))
        report = make_report(10, (make_pool(live=own, cached=GIB),))
        if step is not None:
            report = replace(report, program=replace(report.program, step=StepUsage(steps=int(step(at)))))
        yield at_moment(at, of_device(own + 2 * GIB, (make_process(10, own + 2 * GIB),)), reports=(report,))


@pytest.mark.parametrize("per_minute", [64 * MIB, 128 * MIB, 300 * MIB, 600 * MIB])
def test_growing_is_reported_within_two_minutes(per_minute: float):
    found = first(each_onset(seen(staircase(per_minute, onset=10), steps_of(13))), "growing")
    assert found is not None
    at, verdict = found
    assert 0 < at - 10 * MINUTE <= 120
    assert dict(verdict.evidence)["slope_bytes_per_second"] == pytest.approx(per_minute / MINUTE, rel=0.15)
    assert verdict.since == pytest.approx(1e9 + 10 * MINUTE, abs=45)


@pytest.mark.parametrize("per_minute", [128 * MIB, 300 * MIB])
def test_leak_after_a_plateau_is_reported_within_six_minutes(per_minute: float):
    found = onsets(seen(staircase(per_minute, onset=12), steps_of(19)))
    leak = first(found, "leak")
    assert leak is not None
    assert leak[0] - 12 * MINUTE <= 360
    assert leak[1].time_to_full_seconds is not None
    assert [verdict.kind for _, verdict in found if verdict.kind in ("growing", "leak")] == ["growing", "leak"]


def test_growth_of_a_program_that_is_sampled_within_its_steps():
    """The host runs ahead of the device, so most samples contain some of a step's 1.5 GiB of activations."""
    leak, rng = staircase(300 * MIB, onset=8), Random(1)

    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(15):
            own = int(leak(at))
            live = own + int(rng.uniform(0.2, 1.5) * GIB)
            report = make_report(10, (make_pool(live=live, cached=GIB),))
            step = StepUsage(steps=int(2 * at), live_bytes=own)
            report = replace(report, program=replace(report.program, step=step))
            yield at_moment(at, of_device(live + 2 * GIB, (make_process(10, live + 2 * GIB),)), reports=(report,))

    found = onsets(snapshots())
    growing, quick = first(found, "growing"), first(found, "leak")
    assert growing is not None
    assert quick is not None
    assert growing[0] - 8 * MINUTE <= 120
    assert quick[0] - 8 * MINUTE <= 360
    assert dict(quick[1].evidence)["slope_bytes_per_second"] == pytest.approx(300 * MIB / MINUTE, rel=0.1)


def test_activations_that_grow_are_no_growth_of_a_program_whose_step_ends_are_known():
    """Longer sequences: the sampled live bytes rise, and nothing is kept at the end of a step."""
    rng = Random(1)

    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(100, 1.5):
            live = int(20 * GIB + at * 2 * MIB * rng.uniform(0.9, 1.0))
            step = StepUsage(steps=int(at), live_bytes=20 * GIB)
            report = make_report(10, (make_pool(live=live, cached=GIB),))
            report = replace(report, program=replace(report.program, step=step))
            yield at_moment(at, of_device(live + 2 * GIB, (make_process(10, live + 2 * GIB),)), reports=(report,))

    assert kinds(onsets(snapshots())) <= {"warm-up", "steady", "churn"}
    (steady,) = [verdict for verdict in last(snapshots()) if verdict.pid == 10]
    assert "has been steady at 20.0 GiB at the end of its steps since" in steady.summary


def test_steady_ends_when_the_program_frees_what_its_steps_had():
    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(23):
            live = 20 * GIB if at < 20 * MINUTE else 0
            step = StepUsage(steps=int(min(at, 20 * MINUTE)), live_bytes=20 * GIB)
            report = make_report(10, (make_pool(live=live, cached=20 * GIB - live),))
            report = replace(report, program=replace(report.program, step=step))
            yield at_moment(at, of_device(22 * GIB, (make_process(10, 22 * GIB),)), reports=(report,))

    assert first(each_onset(snapshots()), "steady")
    assert "steady" not in {verdict.kind for verdict in last(snapshots()) if verdict.pid == 10}


def test_growing_ends_when_the_program_does_no_more_steps():
    def snapshots() -> Iterator[Snapshot]:
        grown = staircase(300 * MIB)
        for at in steps_of(9):
            own = int(grown(min(at, 200.0)))
            step = StepUsage(steps=int(2 * min(at, 200.0)), live_bytes=own)
            report = make_report(10, (make_pool(live=own, cached=GIB),))
            report = replace(report, program=replace(report.program, step=step))
            yield at_moment(at, of_device(own + 2 * GIB, (make_process(10, own + 2 * GIB),)), reports=(report,))

    assert first(each_onset(snapshots()), "growing")
    assert "growing" not in {verdict.kind for verdict in last(snapshots())}


def test_epoch_that_allocates_in_parts_is_no_leak():
    parts: Curve = lambda at: 20 * GIB + at // 36 * 512 * MIB  # noqa: E731
    assert "leak" not in kinds(onsets(seen(parts, steps_of(15))))


@pytest.mark.parametrize("counts_steps", [True, False])
def test_growth_from_the_start_is_a_leak_after_an_hour(counts_steps: bool):
    """Before, it may be a data set that is cached, or the first tooth of a collector."""
    steps: Curve | None = (lambda at: 2 * at) if counts_steps else None
    found = onsets(seen(staircase(64 * MIB), steps_of(70, 1.5), steps))
    growing, leak = first(found, "growing"), first(found, "leak")
    assert growing is not None
    assert 60 < growing[0] <= 160
    assert leak is not None
    assert 60 * MINUTE <= leak[0] <= 68 * MINUTE


def test_growth_from_the_start_that_fills_the_device_soon_is_a_leak_before():
    found = first(each_onset(seen(staircase(1500 * MIB), steps_of(30, 1.5))), "leak")
    assert found is not None
    assert 15 * MINUTE < found[0] <= 22 * MINUTE


def test_leak_is_reported_within_six_minutes_while_the_rate_of_steps_changes():
    """Other programs start to use the device, so a step takes longer."""

    def steps(at: float) -> float:
        return 4 * min(at, 600) + max(0, at - 600)

    found = first(each_onset(seen(staircase(300 * MIB, onset=8), steps_of(15), steps)), "leak")
    assert found is not None
    assert found[0] - 8 * MINUTE <= 360


def test_growth_of_a_program_with_steps_states_the_bytes_of_a_step():
    found = onsets(seen(staircase(300 * MIB), steps_of(8), lambda at: 2 * at))
    growing = first(found, "growing")
    assert growing is not None
    assert growing[0] <= 120
    assert dict(growing[1].evidence)["kept_bytes_per_step"] == pytest.approx(2.5 * MIB, rel=0.15)


def test_growth_that_does_not_slow_down_is_no_warm_up():
    found = onsets(seen(staircase(300 * MIB), steps_of(11)))
    began = first(found, "growing")
    assert began is not None
    assert not [verdict for at, verdict in found if verdict.kind == "warm-up" and at > began[0]]


@pytest.mark.parametrize(
    ("name", "curve"),
    [
        ("an approach", lambda at: 20 * GIB + 10 * GIB * (1 - math.exp(-max(0.0, at - 600) / 480))),
        ("an evaluation", lambda at: 20 * GIB + 600 * MIB * min(8.0, max(0.0, at / MINUTE - 12)) * (at < 21 * MINUTE)),
        (
            "an approach and an allocation",
            lambda at: (
                20 * GIB + 4000 * MIB * (1 - math.exp(-max(0.0, at - 600) / 900)) + 2700 * MIB * (at >= 600 + 660)
            ),
        ),
        ("one step", lambda at: (20 if at < 15 * MINUTE else 26) * GIB),
        ("three steps", lambda at: 20 * GIB + 2 * GIB * min(3, max(0, at - 600) // 240)),
    ],
)
def test_leak_is_not_reported_within_minutes_for_other_rises(name: str, curve: Curve):
    assert "leak" not in kinds(onsets(seen(curve, steps_of(25))))


def test_leak_is_not_reported_while_the_program_does_no_steps():
    """An evaluation, or the load of a data set, in a program that counts its steps."""
    live = staircase(128 * MIB, onset=12)
    training: Curve = lambda at: 2 * at  # noqa: E731
    stopped: Curve = lambda at: 2 * min(at, 12 * MINUTE)  # noqa: E731
    assert first(each_onset(seen(live, steps_of(19), training)), "leak") is not None
    assert first(each_onset(seen(live, steps_of(19), stopped)), "leak") is None


def test_growing_ends_when_the_growth_has_ended():
    curve: Curve = lambda at: 20 * GIB + 200 * MIB * min(4.0, max(0.0, at / MINUTE - 10))  # noqa: E731
    assert "growing" in {verdict.kind for verdict in last(seen(curve, steps_of(13.5)))}
    assert "growing" not in {verdict.kind for verdict in last(seen(curve, steps_of(22)))}
    released: Curve = lambda at: curve(at) if at < 14 * MINUTE else 20 * GIB  # noqa: E731
    assert "growing" not in {verdict.kind for verdict in last(seen(released, steps_of(15)))}


def test_growing_states_rate_time_and_what_refutes_it():
    found = first(each_onset(seen(staircase(60 * MIB, onset=10, base=40 * GIB), steps_of(14))), "growing")
    assert found is not None
    assert " has been growing by" in found[1].summary
    assert "/min since 01:5" in found[1].summary
    assert "growth that will stop: a startup, a filling cache or an evaluation" in found[1].summary


def test_growing_requires_many_samples_and_live_bytes():
    assert "growing" not in kinds(onsets(by_process(staircase(300 * MIB, onset=10), steps_of(16, 5.0))))
    assert "growing" not in kinds(onsets(by_agent(lambda at: 10 * GIB, staircase(300 * MIB, onset=10), steps_of(16))))


def test_growth_is_judged_before_the_first_minute_of_any_device():
    """Minutes of different series close at different times."""
    devices = [of_device(GIB, (), uuid=f"GPU-{number}", index=number) for number in range(12)]
    snapshots = [at_moment(at, *devices) for at in steps_of(2, 5.0)]
    assert "growing" not in kinds(onsets(snapshots))
