from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest

from gpumond.diagnosis.leak import _slope_interval
from gpumond.facts.frame import GrowthLine, Verdict
from gpumond.facts.snapshot import Snapshot
from gpumond.facts.units import rough_duration_text
from tests.helpers.agents import GIB
from tests.helpers.curves import (
    HOUR,
    MIB,
    MINUTE,
    SIZE,
    Curve,
    at_moment,
    by_agent,
    by_device,
    by_process,
    each_onset,
    first,
    kinds,
    last,
    leaking,
    noisy,
    of_device,
    onsets,
    steps_of,
)
from tests.helpers.values import make_process

pytestmark = pytest.mark.slow

QUIET = 4 * MIB


def flat(level: float) -> Curve:
    return lambda at: level


@pytest.mark.parametrize("per_minute", [32 * MIB, 60 * MIB, 500 * MIB])
@pytest.mark.parametrize("see", [by_process, by_device])
def test_leak_without_noise_is_found_within_half_an_hour(see, per_minute: float):
    found = first(each_onset(see(noisy(leaking(per_minute, onset=20), QUIET), steps_of(52))), "leak")
    assert found is not None
    at, leak = found
    assert 20 * MINUTE < at <= 50 * MINUTE
    slope = dict(leak.evidence)["slope_bytes_per_second"]
    assert slope == pytest.approx(per_minute / MINUTE, rel=0.1)
    assert leak.since == pytest.approx(1e9 + 20 * MINUTE, abs=3 * MINUTE)
    free = SIZE - leaking(per_minute, onset=20)(at)
    assert leak.time_to_full_seconds == pytest.approx(free / per_minute * MINUTE, rel=0.1)
    assert leak.form == "linear"


def test_leak_in_noisy_serving_is_found_within_the_hour():
    curve = noisy(leaking(128 * MIB, onset=30), 0.3 * GIB)
    found = first(each_onset(by_process(curve, steps_of(95))), "leak")
    assert found is not None
    assert 30 * MINUTE < found[0] <= 90 * MINUTE


@pytest.mark.parametrize("every", [15.0, 57.0, 300.0])
def test_leak_is_found_at_the_pace_of_other_collectors(every: float):
    curve = noisy(leaking(64 * MIB, onset=60), 0.3 * GIB)
    found = first(each_onset(by_process(curve, steps_of(300, every))), "leak")
    assert found is not None
    assert found[0] > 60 * MINUTE


def test_leak_requires_several_samples_in_a_minute():
    """A curve that looks like a leak at one sample a minute for half an hour isn't a leak."""
    curve = leaking(60 * MIB, onset=20)
    assert first(each_onset(by_process(curve, steps_of(50, 57.0))), "leak") is None
    assert first(each_onset(by_process(curve, steps_of(50, 1.0))), "leak") is not None


@pytest.mark.parametrize(
    ("name", "curve", "minutes"),
    [
        ("flat", flat(50 * GIB), 60),
        ("noise", noisy(flat(50 * GIB), GIB), 120),
        ("slow warm-up", lambda at: 50 * GIB * (1 - math.exp(-at / (20 * MINUTE))), 150),
        ("logarithm", lambda at: 4 * GIB * math.log(1 + at / MINUTE), 240),
        ("one step", lambda at: (20 if at < 45 * MINUTE else 40) * GIB, 90),
        ("two steps", lambda at: (20 + 2 * (at > 120 * MINUTE) + 2 * (at > 150 * MINUTE)) * GIB, 240),
        ("three steps", lambda at: (20 + 10 * min(3, at // (80 * MINUTE))) * GIB, 330),
        ("ramps", lambda at: 20 * GIB + max(0.0, at % (30 * MINUTE) - 20 * MINUTE) * GIB / MINUTE, 180),
        ("one ramp", lambda at: 20 * GIB + min(10 * MINUTE, max(0.0, at - HOUR)) / MINUTE * GIB, 120),
        ("a long wave", noisy(lambda at: (30 - 8 * math.cos(at / HOUR * math.pi)) * GIB, 64 * MIB), 300),
        ("below the floor", leaking(2 * MIB, onset=20), 60),
    ],
)
@pytest.mark.parametrize("see", [by_process, by_device])
def test_leak_is_not_reported_for_other_curves(see, name: str, curve: Curve, minutes: float):
    if name == "a long wave":  # the history shows that the first rise of a life is a rise
        curve_from_its_height: Curve = lambda at: curve(at + HOUR)  # noqa: E731
        assert "leak" not in kinds(onsets(see(curve_from_its_height, steps_of(minutes, 5.0))))
        return
    assert "leak" not in kinds(onsets(see(curve, steps_of(minutes, 5.0 if minutes > 100 else 1.0))))


def test_leak_is_not_reported_for_growth_with_the_load():
    def snapshots(rising: bool):
        for at in steps_of(60):
            busy = 0.2 + 0.6 * max(0.0, at - 20 * MINUTE) / (40 * MINUTE) if rising else 0.4
            yield from by_process(leaking(100 * MIB, onset=20), [at], busy=busy)

    assert "leak" not in kinds(onsets(snapshots(rising=True)))
    assert first(each_onset(snapshots(rising=False)), "leak")


def test_leak_uses_live_bytes_before_the_drivers_count():
    """A cache that grows while the live bytes are constant isn't a leak of the program."""
    growing = leaking(100 * MIB, onset=15)
    assert "leak" not in kinds(onsets(by_agent(flat(10 * GIB), growing, steps_of(50))))
    found = first(
        each_onset(by_agent(leaking(100 * MIB, onset=15, base=10 * GIB), flat(40 * GIB), steps_of(50))), "leak"
    )
    assert found is not None
    assert found[1].pid == 10


def test_leak_outside_the_pools_is_reported_as_such():
    outside = leaking(100 * MIB, onset=15, base=GIB)
    found = first(each_onset(by_agent(flat(10 * GIB), flat(12 * GIB), steps_of(50), outside)), "leak")
    assert found is not None
    assert dict(found[1].evidence)["outside_pools"] == 1
    assert "outside its allocators' pools" in found[1].summary


def test_leak_of_a_sawtooth_with_a_rising_minimum():
    def live(at: float) -> float:
        epoch = at // (5 * MINUTE)
        return 20 * GIB + max(0, epoch - 5) * 254 * MIB + (at % (5 * MINUTE)) / (5 * MINUTE) * 16 * GIB

    found = first(each_onset(by_agent(live, flat(60 * GIB), steps_of(120))), "leak")
    assert found is not None
    assert dict(found[1].evidence)["slope_bytes_per_second"] == pytest.approx(254 * MIB / 300, rel=0.2)


def test_leak_of_evaluations_that_keep_half_begins_with_the_second():
    def live(at: float) -> float:
        done, now = divmod(at - 15 * MINUTE, 30 * MINUTE)
        kept = 12 * GIB * (max(-1.0, done) + 1)
        return 10 * GIB + kept + (12 * GIB if done >= 0 and now < 60 else 0)

    found = first(each_onset(by_agent(live, lambda at: max(live(at), 60 * GIB), steps_of(80))), "leak")
    assert found is not None
    assert 45 * MINUTE < found[0] < 55 * MINUTE
    assert found[1].form == "stairs"


@pytest.mark.parametrize(("kept", "leaks"), [((10, 11), 1), ((8, 12), 0)])
def test_two_phases_that_keep_different_amounts_are_no_leak(kept: tuple[int, ...], leaks: int):
    """Models that are loaded allocate more than they keep, as evaluations do."""
    levels = [10 * GIB, (10 + kept[0]) * GIB, (10 + sum(kept)) * GIB]

    def used(at: float) -> float:
        number, now = divmod(at, 30 * MINUTE)
        return levels[min(2, int(number))] + (20 * GIB if number in (1, 2) and now < 60 else 0)

    found = onsets(by_process(used, steps_of(240, 30.0)), speedup=1.0)
    assert [verdict.kind for _, verdict in found].count("leak") == leaks


def test_leak_in_proportion_to_the_load_has_that_form():
    def snapshots():
        level = 20.0 * GIB
        for at in steps_of(120):
            busy = (at // (10 * MINUTE)) % 2 == 0
            level += 5 * MIB if busy and at > 20 * MINUTE else 0
            yield from by_process(flat(level), [at], busy=0.7 if busy else 0.0)

    leak = next(verdict for verdict in last(snapshots()) if verdict.kind == "leak")
    assert leak.form == "load-proportional"


@pytest.mark.parametrize(
    ("heights", "leaks"), [((10, 10, 10), 1), ((27, 12, 10), 1), ((9, 12, 34), 0), ((34, 10, 10), 0)]
)
def test_leak_in_large_steps_is_reported_once(heights: tuple[int, ...], leaks: int):
    """Three steps in forty minutes each, after which the level stays."""
    levels = [10 * GIB + sum(heights[:number]) * GIB for number in range(4)]
    stairs: Curve = lambda at: levels[min(3, int(at // (40 * MINUTE)))]  # noqa: E731
    found = onsets(by_process(stairs, steps_of(600, 30.0)), speedup=1.0)
    assert [verdict.kind for _, verdict in found].count("leak") == leaks


@pytest.mark.parametrize(("counted", "after"), [(True, 60.0), (False, 90.0)])
def test_growth_from_the_start_takes_longer_without_an_agent(counted: bool, after: float):
    """An agent tells what a step keeps from what it uses; the driver does not."""
    curve, times = leaking(100 * MIB), steps_of(105, 5.0)
    snapshots = by_agent(curve, lambda at: curve(at) + GIB, times) if counted else by_process(curve, times)
    found = first(each_onset(snapshots), "leak")
    assert found is not None
    assert after * MINUTE < found[0] < (after + 10) * MINUTE


def layers(heights: Sequence[float], minutes: float) -> Curve:
    """Rise by these GiB, one height after another, in pauses of so many minutes."""
    totals = [20 + sum(heights[:number]) for number in range(len(heights) + 1)]
    return lambda at: totals[min(len(heights), int(at / MINUTE / minutes))] * GIB


def test_growth_by_few_steps_is_no_leak():
    """A program that unfreezes its layers, one in each epoch."""
    unfreezing = layers((1.2, 0.9, 2.0, 1.5, 0.7, 1.1, 1.8, 1.4), 6)
    assert "leak" not in kinds(onsets(by_process(unfreezing, steps_of(150, 5.0))))


def test_growth_by_ever_rarer_steps_is_no_leak():
    """Shards of a table, of which the later ones are asked for less often."""
    shards: Curve = lambda at: (20 + int(6 * math.log2(1 + at / (8 * MINUTE)))) * GIB  # noqa: E731
    assert "leak" not in kinds(onsets(by_process(shards, steps_of(300, 5.0))))


def test_growth_by_many_steps_is_a_leak():
    assert "leak" in kinds(onsets(by_process(layers([0.6] * 40, 5), steps_of(150, 5.0))))


def test_leak_in_stairs_has_that_form():
    curve: Curve = lambda at: 20 * GIB + at // (4 * MINUTE) * 400 * MIB  # noqa: E731
    leak = next(verdict for verdict in last(by_process(curve, steps_of(110))) if verdict.kind == "leak")
    assert leak.form == "stairs"


@pytest.mark.parametrize(
    ("name", "after"),
    [("returned", lambda at: 20 * GIB), ("stopped", lambda at: 20 * GIB + 40 * 100 * MIB)],
)
def test_leak_that_has_ended_is_not_active(name: str, after: Curve):
    leak = leaking(100 * MIB, onset=20)
    verdicts = last(by_process(lambda at: leak(at) if at < HOUR else after(at), steps_of(150, 5.0)))
    assert "leak" not in {verdict.kind for verdict in verdicts}


def test_leak_is_active_as_long_as_it_lasts():
    found = onsets(by_process(noisy(leaking(64 * MIB, onset=20), 0.1 * GIB), steps_of(300, 5.0)))
    assert [verdict.kind for _, verdict in found].count("leak") == 1


def test_leak_of_ranks_is_one_verdict_with_their_number():
    def snapshots():
        for at in steps_of(45):
            used = [int(leaking((60 + rank) * MIB, onset=15, base=(20 if rank else 60) * GIB)(at)) for rank in range(4)]
            yield at_moment(
                at,
                *(
                    of_device(size, (make_process(10 + rank, size, comm="train"),), uuid=f"GPU-{rank}", index=rank)
                    for rank, size in enumerate(used)
                ),
            )

    leaks = [verdict for verdict in last(snapshots()) if verdict.kind == "leak"]
    assert len(leaks) == 1
    evidence = dict(leaks[0].evidence)
    assert (evidence["processes"], evidence["devices"]) == (4, 4)
    begin = (
        "the memory of 4 programs on 4 GPUs started growing at about the same time, possibly because of higher load "
    )
    assert leaks[0].summary.startswith(f"{begin}or the same bug. The first to fill its GPU: train (pid 10) is leaking ")
    fit, left = leaks[0].fit, leaks[0].time_to_full_seconds
    assert fit is not None
    assert fit.full_at is not None
    assert left is not None
    assert (fit.device_uuid, fit.pid) == ("GPU-0", 10), "the first device that is full"
    assert leaks[0].pid != 10
    assert "(pid 10) is leaking" in leaks[0].summary
    assert leaks[0].summary.endswith(f"; at this rate, GPU 0 will be full in {rough_duration_text(left)}")
    assert 0 <= 1e9 + 45 * MINUTE + left - fit.full_at <= MINUTE


def test_leak_summary_has_pace_onset_and_end():
    found = first(each_onset(by_process(leaking(64 * MIB, onset=20, base=40 * GIB), steps_of(50))), "leak")
    assert found is not None
    assert 40 * GIB < dict(found[1].evidence)["device_peak_bytes"] < 42 * GIB
    assert found[1].summary.startswith("train (pid 10) is leaking about 64 MiB/min on GPU 0 (since 02:")
    assert "; at this rate, GPU 0 will be full in about 10 h" in found[1].summary
    assert "recent peak" not in found[1].summary


RETURNS = r"will be full in about 10 h, or in about 5 h if usage returns to the recent peak of (\d+)\.\d GiB$"


def test_time_to_full_states_the_peak_from_which_it_is_counted():
    """A neighbor takes 20 GiB for a moment every five minutes: they are free when the verdict is read."""

    def snapshots() -> Iterator[Snapshot]:
        for at in steps_of(50):
            own, other = int(leaking(64 * MIB, onset=20, base=40 * GIB)(at)), 20 * GIB * (at % 300 < 10)
            processes = (make_process(10, own, comm="train"), make_process(11, int(other), comm="bursts"))
            yield at_moment(at, of_device(own + int(other), processes))

    found = first(each_onset(snapshots()), "leak")
    assert found is not None
    peak = re.search(RETURNS, found[1].summary)
    assert peak is not None
    assert 60 <= int(peak[1]) <= 62


LIVE = leaking(300 * MIB, onset=12)


def evidence_of(kind: str, snapshots: Iterable[Snapshot]) -> dict[str, float]:
    verdict: Verdict = next(each for each in last(snapshots) if each.kind == kind)
    return dict(verdict.evidence)


@pytest.mark.parametrize(("kind", "minutes"), [("growing", 16), ("leak", 19)])
def test_held_bytes_grow_with_the_live_bytes_or_not_at_all(kind: str, minutes: float):
    times = list(steps_of(minutes))
    growing = evidence_of(kind, by_agent(LIVE, lambda at: LIVE(at) + GIB, times))
    assert growing["held_growth_bytes"] == pytest.approx(growing["growth_bytes"], rel=0.25)
    from_cache = evidence_of(kind, by_agent(LIVE, lambda at: 30 * GIB, times))
    assert from_cache["held_growth_bytes"] == 0


def test_growth_without_an_agent_has_no_held_bytes():
    assert "held_growth_bytes" not in evidence_of("leak", by_process(LIVE, steps_of(42)))


EPOCH = 1e9


def fit_of(snapshots) -> GrowthLine:
    found = first(each_onset(snapshots), "leak")
    assert found is not None
    fit = found[1].fit
    assert fit is not None
    return fit


@pytest.mark.parametrize(("per_minute", "noise", "minutes"), [(100 * MIB, 4 * MIB, 50), (200 * MIB, 0.3 * GIB, 100)])
def test_fit_states_when_the_device_is_full(per_minute: float, noise: float, minutes: int):
    onset, base = minutes / 4, leaking(0.0)(0.0)
    fit = fit_of(by_process(noisy(leaking(per_minute, onset=onset), noise), steps_of(minutes)))
    full_at = EPOCH + onset * MINUTE + (SIZE - base) / per_minute * MINUTE
    assert fit.slope_low_bytes_per_second <= per_minute / MINUTE <= fit.slope_high_bytes_per_second
    assert fit.full_at_earliest is not None
    assert fit.full_at is not None
    assert fit.full_at_latest is not None
    assert fit.full_at_earliest < fit.full_at < fit.full_at_latest
    assert fit.full_at_earliest - 5 * MINUTE <= full_at <= fit.full_at_latest + 5 * MINUTE


def test_fit_contains_the_points_and_their_line():
    fit = fit_of(by_process(noisy(leaking(100 * MIB, onset=15), 4 * MIB), steps_of(44)))
    assert len(fit.points) >= 6
    assert fit.points[-1][0] == fit.at
    inside = [
        abs(value - fit.level_bytes - fit.slope_bytes_per_second * (at - fit.at)) <= fit.band_bytes
        for at, value in fit.points
    ]
    assert sum(inside) >= 0.6 * len(inside)
    assert {refused.kind for refused in fit.ruled_out} >= {"warm-up", "step-change"}
    warm_up = next(refused for refused in fit.ruled_out if refused.kind == "warm-up")
    assert warm_up.value == pytest.approx(1.0, abs=0.3)


def test_fit_of_stairs_consists_of_the_steps():
    """Evaluations that keep half of their memory."""

    def used(at: float) -> float:
        done, now = divmod(at - 15 * MINUTE, 30 * MINUTE)
        return 10 * GIB + 12 * GIB * (max(-1.0, done) + 1) + (12 * GIB if done >= 0 and now < 60 else 0)

    fit = fit_of(by_process(used, steps_of(60)))
    assert [value / GIB for _, value in fit.points] == pytest.approx([22, 34], abs=0.1)
    assert fit.slope_bytes_per_second == pytest.approx(12 * GIB / (30 * MINUTE), rel=0.1)


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.85), (0.5, 0.8), (0.8, 0.7)])
def test_interval_of_the_slope_contains_the_slope_although_successive_points_are_correlated(
    correlation: float, least: float
):
    """Without the widening, the shares are 0.91, 0.70 and 0.50."""
    rng, found, draws = Random(1), 0, 300
    for _ in range(draws):
        deviation, values = 0.0, list[float]()
        for number in range(24):
            deviation = correlation * deviation + rng.gauss(0, math.sqrt(1 - correlation**2))
            values.append(0.3 * number + deviation)
        slopes = _slope_interval(range(24), values)
        found += slopes.low <= 0.3 <= slopes.high
    assert found / draws >= least
