"""The serving test of leaks: what it finds, and each of its conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf, nan
from random import Random

import pytest

from gpumond.diagnosis.leak_criteria import CandidateCurve, Leak
from gpumond.diagnosis.serving_leak import (
    MAX_BLOCKS,
    SERVING_TESTS,
    ServingTest,
    UpperQuartiles,
    find_serving_leak,
    updated_serving_leak,
)
from gpumond.tick.history import DEVICE_SIGNAL_COUNT, FIVE_MINUTES, MAX_PROCESS_SIGNALS, USED, Series
from tests.helpers.curves import GIB, HOUR, MIB, MINUTE, by_process, each_onset, first, steps_of

SIZE = 48 * GIB
BLOCK = 5 * MINUTE
TEST = ServingTest()
FLAT = [20.0 * GIB] * 40


def growing(per_block: float, blocks: int = 16, base: float = 20 * GIB) -> list[float]:
    return [base + per_block * number for number in range(1, blocks + 1)]


class Observed:
    """A curve of one value for each block, sampled ``every`` seconds; ``gap``: a block, and the number of blocks that
    are missing before it.
    """

    def __init__(
        self,
        values: Sequence[float],
        every: float = MINUTE,
        busy: Sequence[float] = (),
        gap: tuple[int, int] = (0, 0),
        started: float = 0.0,
    ) -> None:
        self.series, self.device, self.quartiles = (
            Series(MAX_PROCESS_SIGNALS, started, 0.0),
            Series(DEVICE_SIGNAL_COUNT, started, 0.0),
            UpperQuartiles(),
        )
        self.started, missing = started, 0.0
        for number in range(int(len(values) * BLOCK / every) + bool(values)):
            at = number * every
            block = min(int(at // BLOCK), len(values) - 1)
            missing = gap[1] * BLOCK if block >= gap[0] else 0.0
            self.add(at + missing, values[block], busy[block] if busy else nan)

    def add(self, at: float, value: float, busy: float = nan) -> None:
        closed = self.series.add((at, value, nan, nan, nan, nan))
        self.device.add((at, value, nan, nan, nan, nan, busy, nan, nan, nan))
        if closed > FIVE_MINUTES:
            self.quartiles.add(self.series, USED)

    def leak(self, test: ServingTest = TEST, room: float | None = 16 * GIB, speedup: float = 1.0) -> Leak | None:
        candidate = CandidateCurve(self.series, self.device, USED, self.started, SIZE, room, speedup)
        return find_serving_leak(candidate, self.quartiles, (test,))


def test_serving_test_finds_steady_growth():
    leak = Observed(FLAT + growing(100 * MIB)).leak()
    assert leak is not None
    assert leak.slope == pytest.approx(100 * MIB / BLOCK)
    assert leak.onset == pytest.approx(len(FLAT) * BLOCK, abs=2 * BLOCK)
    assert leak.growth_bytes == pytest.approx(1600 * MIB, rel=0.1)


def test_serving_test_finds_a_leak_below_the_changes_of_the_load():
    """Idle and busy differ by 2 GiB every ten to thirty minutes; the leak adds 160 MiB in a block."""
    rng, load = Random(3), list[float]()
    while len(load) < 120:
        load += [rng.choice((0.0, 2.0 * GIB))] * rng.randint(2, 6)
    leaking = [20 * GIB + load[i] + max(0, i - 60) * 320 * MIB for i in range(110)]
    assert any(Observed(leaking[:end]).leak() for end in range(70, 110))
    assert not any(Observed([20 * GIB + load[i] for i in range(end)]).leak() for end in range(20, 110, 3))


def test_serving_test_ignores_an_excursion_of_fifteen_minutes():
    """The record over single blocks would not report this leak for hours."""
    past = [*FLAT[:20], *[26.0 * GIB] * 3, *FLAT[:20]]
    assert Observed(past + growing(100 * MIB)).leak() is not None


def test_serving_test_requires_a_past_as_long_as_the_last_blocks():
    assert Observed(FLAT[:9] + growing(100 * MIB)).leak() is None
    assert Observed(FLAT[:10] + growing(100 * MIB)).leak() is not None


def jumping(rate: float, onset: int, until: int, rests: float = 0.2, falls: bool = False) -> Observed:
    """Load that jumps from minute to minute, and in a share of them stays as it is, with growth from a minute on.
    ``falls``: the curve fell at the same rate before.
    """
    observed, rng, load = Observed(()), Random(5), 20.0 * GIB
    for minute in range(until):
        load = load if rng.random() < rests else rng.uniform(12, 24) * GIB
        grown = rate * (abs(minute - onset) if falls else max(0, minute - onset))
        observed.add(minute * MINUTE, load + grown)
    return observed


def slowing(minutes: float) -> Observed:
    """A cache that fills under load that jumps, with this time constant."""
    observed, rng, load = Observed(()), Random(5), 20.0 * GIB
    for minute in range(270):
        load = load if rng.random() < 0.5 else rng.uniform(12, 24) * GIB
        observed.add(minute * MINUTE, load + 10 * GIB * (1 - exp(-max(0, minute - 180) / minutes)))
    return observed


def test_serving_test_finds_growth_between_the_jumps_of_the_load_within_the_hour():
    assert jumping(64 * MIB, 240, 300).leak() is not None
    assert jumping(64 * MIB, 240, 300, rests=0.0).leak() is None


@pytest.mark.parametrize(
    ("name", "curve"),
    [
        ("no growth", jumping(0.0, 240, 300)),
        (
            "rests at levels that rise",
            Observed(FLAT + [20 * GIB + rng * GIB for rng in (0, 2, 1, 3, 0, 4, 3, 5, 2, 6)]),
        ),
        ("fell as much before", jumping(64 * MIB, 180, 240, falls=True)),
        ("ever slower growth", slowing(60.0)),
    ],
)
def test_serving_test_ignores_jumps_alone_and_waves(name: str, curve: Observed):
    assert curve.leak() is None


def above(*mebibytes: float) -> list[float]:
    return [20 * GIB + one * MIB for one in mebibytes]


RAMP = growing(100 * MIB, 40)
ROUGH = above(4, 1049, 1843, 2774, 2831, 244, 3422, 3448, 2584, 1033, 5321, 7797, 1494, 6922, 7625, 6615)
STEP = growing(37 * MIB, 7, 20 * GIB - 37 * MIB) + growing(37 * MIB, 9, 21 * GIB)
STEPS = above(-1075, 233, -307, 628, -315, -96, 452, 3443, 1517, 1406, 746, 1736, 4226, 1399, 2509, 3692)
NO_STEPS = {"max_two_steps_ratio": inf, "between_steps_ratio": -inf}
WAVE = [20.0 * GIB] * 12 + [23.0 * GIB] * 12 + [20.0 * GIB] * 20


@pytest.mark.parametrize(
    ("name", "curve", "loose"),
    [
        ("few samples", Observed(FLAT + RAMP[:16], every=2 * MINUTE), {"min_samples": 2}),
        ("a gap", Observed(FLAT + RAMP[:4] + RAMP[24:36], gap=(44, 20)), {"max_span_ratio": 3.0}),
        ("slow growth", Observed(FLAT + growing(64 * MIB)), {"margin_bytes": 256 * MIB, "margin_ratio": 0.0}),
        ("falls between rises", Observed(FLAT + ROUGH), {"consistent_ratio": -inf, **NO_STEPS}),
        ("one step", Observed(FLAT + STEP), NO_STEPS),
        ("two steps", Observed(FLAT + STEPS), NO_STEPS),
        (
            "an hour as high before",
            Observed(WAVE + RAMP[:16]),
            {"margin_bytes": -4 * GIB, "margin_ratio": -1.0, "past_quantile": 0.5},
        ),
    ],
)
def test_serving_test_has_conditions(name: str, curve: Observed, loose: dict[str, float]):
    """Each curve passes all conditions but those that are loosened."""
    assert curve.leak() is None
    assert curve.leak(replace(TEST, **loose)) is not None


CACHES = {
    "urgent": "39212 39328 41434 45422 45890 50580 51044 51184 46974 46643 47354 49306 49112 49305 53212 53704 54167"
    " 55117 55253 52546 51954 51634 52144 52072 52267 51671 51141 51034 51584 52018 51569 54401 54926 54561"
    " 55032 55507 62340 61978 61952 58494",
    "slow": "32597 38154 52591 53480 53212 55476 55799 56213 56297 55715 55580 61561 61245 61529 61934 61802 62306"
    " 62159 61983 61672 61707 61385 60976 60234 59933 60659 59687 60029 60184 60856 61096 61436 61330 61675"
    " 61556 61443 61472 60559 60450 60977 60824 61039 61386 64597 64620 64178 64494 64221 64476 64283 64560"
    " 63790 64849 65339 65878 65677 65700 66218 66471 66426 66304",
}
"""Upper quartiles in MiB of caches that grow in large blocks and fill, at the time of a false leak."""


@pytest.mark.parametrize("name", CACHES)
def test_serving_test_refuses_a_cache_that_grows_in_a_few_steps(name: str):
    observed = Observed([float(value) * MIB for value in CACHES[name].split()])
    candidate = CandidateCurve(observed.series, observed.device, USED, observed.started, 80 * GIB, 14 * GIB, 1.0)
    loose = [replace(test, **NO_STEPS) for test in SERVING_TESTS]
    assert find_serving_leak(candidate, observed.quartiles, loose) is not None
    assert find_serving_leak(candidate, observed.quartiles) is None


def test_serving_test_requires_more_growth_between_the_steps_of_a_whole_device():
    steps = [20 * GIB + (100 * number + 1200 * (number // 4)) * MIB for number in range(1, 17)]
    observed, loose = Observed(FLAT + steps), replace(TEST, consistent_ratio=-inf, max_two_steps_ratio=inf)
    candidate = CandidateCurve(observed.series, observed.series, USED, observed.started, SIZE, 16 * GIB, 1.0)
    assert observed.leak(loose) is not None
    assert find_serving_leak(candidate, observed.quartiles, (loose,)) is None
    assert find_serving_leak(candidate, observed.quartiles, (replace(loose, whole_device_multiple=1.0),)) is not None


def test_serving_test_requires_a_window_of_past():
    short = [20.0 * GIB] * 9 + growing(200 * MIB, 9)
    assert Observed(short).leak() is None
    assert Observed(short).leak(replace(TEST, blocks=8, new_high_blocks=4)) is not None


def test_serving_test_requires_growth_to_the_end():
    assert Observed(FLAT + RAMP[:16]).leak() is not None
    assert Observed(FLAT + RAMP[:8] + [RAMP[8]] * 8).leak(replace(TEST, consistent_ratio=-inf)) is None


def test_serving_test_requires_room_that_is_soon_used():
    assert Observed(FLAT + RAMP[:16]).leak(room=50 * GIB) is not None
    assert Observed(FLAT + RAMP[:16]).leak(room=60 * GIB) is None


def test_serving_test_requires_a_load_that_does_not_rise():
    values = FLAT + RAMP[:16]
    rising = [0.2] * 40 + [0.2 + 0.03 * number for number in range(16)]
    assert Observed(values, busy=rising).leak() is None
    assert Observed(values, busy=[0.4] * 56).leak() is not None


def test_serving_test_scales_its_samples_with_the_pace():
    curve = Observed(FLAT + RAMP[:16], every=2 * MINUTE)
    assert curve.leak() is None
    assert curve.leak(speedup=2.0) is not None


def test_serving_leak_ends_when_it_stops_or_its_growth_is_returned():
    values = FLAT + RAMP[:16]
    for after, active in ((RAMP[16:24], True), ([RAMP[15]] * 24, False), ([20.0 * GIB] * 2, False)):
        leak = Observed(values).leak()
        for end in range(len(values) + 1, len(values) + len(after) + 1):
            curve = Observed((values + after)[:end])
            leak = leak and updated_serving_leak(leak, curve.quartiles, curve.series)
        assert (leak is not None) == active


def test_upper_quartiles_are_those_of_the_minutes_of_one_signal():
    observed = Observed([])
    for minute in range(5 * (MAX_BLOCKS + 10) + 1):
        observed.add(minute * MINUTE, float(minute % 5))
    quartiles = observed.quartiles
    assert len(quartiles.times) == MAX_BLOCKS
    assert set(quartiles.values) == {3.0}
    assert set(quartiles.counts) == {5.0}
    quartiles.add(observed.series, USED + 1)
    assert len(quartiles.times) == 0


def test_serving_leak_is_reported_at_one_sample_a_minute():
    """Idle and busy alternate; the record over single blocks, and the largest rise, hide this leak from other tests."""
    rng, load = Random(2), list[float]()
    while len(load) < 9 * 60:
        load += [rng.choice((0.0, 3.0 * GIB))] * rng.randint(5, 40)

    def used(at: float, leak: float) -> float:
        minute = int(at // MINUTE)
        return 20 * GIB + load[min(minute, len(load) - 1)] + leak * max(0.0, at - 4 * HOUR) / MINUTE

    found = first(each_onset(by_process(lambda at: used(at, 64 * MIB), steps_of(9 * 60, 57.0))), "leak")
    assert found is not None
    assert 4 * HOUR < found[0] < 7 * HOUR
    assert found[1].form
    assert first(each_onset(by_process(lambda at: used(at, 0.0), steps_of(9 * 60, 57.0))), "leak") is None


def test_upper_quartiles_of_64_devices_and_500_lives_need_at_most_5_mib():
    rows = Observed([1.0] * (MAX_BLOCKS + 10)).quartiles.rows
    assert len(rows) == MAX_BLOCKS
    assert 564 * rows.size_bytes <= 5 * MIB
