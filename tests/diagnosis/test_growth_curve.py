from __future__ import annotations

import math
from random import Random

import pytest

from gpumond.diagnosis import sentences
from gpumond.diagnosis.growth_curve import between_rests, final_growth, fit_curve, forecasts
from tests.helpers.agents import GIB
from tests.helpers.curves import HOUR, MIB, MINUTE, Curve

MINUTES = [MINUTE * number for number in range(120)]


def course_of(curve: Curve, noise: float = 0.0):
    rng = Random(1)
    growth = final_growth(MINUTES, [curve(at) + rng.gauss(0, noise) for at in MINUTES])
    assert growth is not None
    return growth, fit_curve(growth)


@pytest.mark.parametrize(
    ("curve", "least", "most"),
    [
        (lambda at: at * MIB, 0.9, 1.1),
        (lambda at: at**0.5 * 64 * MIB, 0.1, 0.8),
        (lambda at: at**2 * MIB / 1000, 1.2, 2.4),
    ],
)
def test_exponent_of_a_line_is_1_and_that_of_slower_growth_is_smaller(curve: Curve, least: float, most: float):
    _, found = course_of(curve, 8 * MIB)
    assert found is not None
    assert least <= found.min_exponent <= found.exponent <= found.max_exponent <= most


@pytest.mark.parametrize(
    "curve",
    [
        lambda at: 20 * GIB * at / (at + HOUR),
        lambda at: 4 * GIB * math.log(1 + at / (10 * MINUTE)),
        lambda at: 20 * GIB * (1 - math.exp(-at / HOUR)),
    ],
)
def test_curve_of_a_cache_that_fills_is_below_a_line(curve: Curve):
    _, found = course_of(curve, 8 * MIB)
    assert found is not None
    assert found.max_exponent < 0.9


def test_growth_begins_where_the_flat_curve_ends():
    growth, _ = course_of(lambda at: 20 * GIB + 100 * MIB * max(0.0, at / MINUTE - 60))
    assert growth.was_flat
    assert growth.begin == pytest.approx(HOUR, abs=5 * MINUTE)
    assert growth.base_bytes == pytest.approx(20 * GIB, abs=100 * MIB)


def test_growth_after_a_start_begins_at_the_last_flat_part():
    """The program allocates 8 GiB in its first minutes."""
    start: Curve = lambda at: 8 * GIB * (1 - math.exp(-at / 300))  # noqa: E731
    growth, _ = course_of(lambda at: start(at) + 300 * MIB * max(0.0, at / MINUTE - 60))
    assert growth.begin == pytest.approx(HOUR, abs=8 * MINUTE)


def test_time_to_full_of_accelerating_growth_follows_its_course():
    growth, found = course_of(lambda at: 20 * GIB * (at / (2 * HOUR)) ** 2)
    assert found is not None
    assert found.accelerates
    best = forecasts(growth)[0]
    assert best.seconds_left(60 * GIB, best.exponent) == pytest.approx(2 * HOUR, rel=0.1)


def test_exponential_growth_is_full_sooner_than_its_visible_part_says():
    """Its visible part is a power law whose begin is later than that of the growth."""
    growth, found = course_of(lambda at: GIB * math.exp(at / HOUR))
    assert found is not None
    room = 40 * GIB
    left = HOUR * math.log(1 + room / (GIB * math.exp(2)))
    best = forecasts(growth)[0]
    assert left < best.seconds_left(room, best.exponent) < 1.25 * left
    assert found.seconds_left(room, found.exponent) > 1.4 * left


@pytest.mark.parametrize("curve", [lambda at: 300 * MIB * at / MINUTE, lambda at: 20 * GIB * (at / HOUR) ** 0.5])
def test_growth_that_does_not_accelerate_has_its_line(curve: Curve):
    _, found = course_of(curve, 8 * MIB)
    assert found is not None
    assert not found.accelerates


@pytest.mark.parametrize(
    ("curve", "count"),
    [
        (lambda at: 300 * MIB * at / MINUTE, None),
        (lambda at: GIB * (at // (10 * MINUTE)), 12),
        (lambda at: GIB * (at // (10 * MINUTE) + 6 * (at // (20 * MINUTE) % 2)), 1),
    ],
)
def test_steps_of_a_growth_are_its_points_before_each(curve: Curve, count: int | None):
    """A line has no rests, and a curve that falls as well has no steps."""
    growth, _ = course_of(curve, 2 * MIB)
    steps = between_rests(growth)
    assert (None if steps is None else len(steps.values)) == count


@pytest.mark.parametrize(
    ("days", "end"),
    [(3, "; the GPU will be full in about 3 d, unless growth stops"), (50_000, ""), (math.inf, "")],
)
def test_time_until_full_is_stated_if_it_is_near(days: float, end: str):
    evidence = {"slope_bytes_per_second": MIB, "full_seconds": days * 24 * HOUR}
    summary = sentences.pattern("filling", "train (pid 1)", "GPU 0", evidence, 0.0, 0.0)
    assert (
        summary
        == f"train (pid 1) has been growing more and more slowly since 00:00:00 UTC, now by about 60 MiB/min{end}"
    )


@pytest.mark.parametrize(("now", "onset"), [(HOUR, "00:30:00 UTC"), (25 * HOUR, "1970-01-01 00:30:00 UTC")])
def test_onset_before_today_has_its_date(now: float, onset: str):
    summary = sentences.pattern("steady", "GPU 0", "GPU 0", {"level_bytes": 1024 * MIB}, 0.5 * HOUR, now)
    assert summary == f"memory in use on GPU 0 has been steady at 1.0 GiB since {onset}"
