"""Points of a leak, the line through them, and the time at which the device is full."""

from __future__ import annotations

import math
from random import Random

import pytest

from gpumond.diagnosis.leak_fit import _interval
from gpumond.facts.frame import Fit
from tests.helpers.curves import GIB, MIB, MINUTE, SIZE, by_process, each_onset, first, leaking, noisy, steps_of

EPOCH = 1e9


def fit_of(snapshots) -> Fit:
    found = first(each_onset(snapshots), "leak")
    assert found is not None
    fit = found[1].fit
    assert fit is not None
    return fit


@pytest.mark.parametrize(("per_minute", "noise", "minutes"), [(100 * MIB, 4 * MIB, 20), (200 * MIB, 0.3 * GIB, 100)])
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
    fit = fit_of(by_process(noisy(leaking(100 * MIB, onset=15), 4 * MIB), steps_of(40)))
    assert len(fit.points) >= 6
    assert fit.points[-1][0] == fit.at
    inside = [
        abs(value - fit.level_bytes - fit.slope_bytes_per_second * (at - fit.at)) <= fit.band_bytes
        for at, value in fit.points
    ]
    assert sum(inside) >= 0.6 * len(inside)
    assert {refused.kind for refused in fit.refused} >= {"warm-up", "step-change"}
    warm_up = next(refused for refused in fit.refused if refused.kind == "warm-up")
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
    dice, found, draws = Random(1), 0, 300
    for _ in range(draws):
        deviation, values = 0.0, list[float]()
        for number in range(24):
            deviation = correlation * deviation + dice.gauss(0, math.sqrt(1 - correlation**2))
            values.append(0.3 * number + deviation)
        slopes = _interval(range(24), values)
        found += slopes.low <= 0.3 <= slopes.high
    assert found / draws >= least
