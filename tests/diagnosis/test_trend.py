from __future__ import annotations

import math
from random import Random

import pytest

from gpumond.diagnosis.trend import MAD_TO_STANDARD_DEVIATION, mann_kendall, sen_slope, spread


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_mann_kendall_equals_pymannkendall(seed: int, ties: bool):
    import pymannkendall  # not at the top: every worker would import scipy to collect these tests

    rng = Random(seed)
    values = [float(rng.randint(0, 3 if ties else 10**6) + seed % 3 * i) for i in range(8 + seed % 9)]
    assert mann_kendall(values) == pytest.approx(pymannkendall.original_test(values).z)


@pytest.mark.parametrize("seed", range(20))
def test_sen_equals_scipy(seed: int):
    from scipy import stats

    rng = Random(seed)
    times = sorted(rng.sample(range(1000), 5 + seed))
    values = [rng.gauss(0.1 * at, 5.0) for at in times]
    assert sen_slope(times, values) == pytest.approx(stats.theilslopes(values, times).slope)


@pytest.mark.parametrize("seed", range(5))
def test_spread_is_the_scaled_median_absolute_deviation(seed: int):
    from scipy import stats

    rng = Random(seed)
    rest = [rng.gauss(0, 3) for _ in range(30)]
    values = [2.5 * i + value for i, value in enumerate(rest)]
    assert spread(range(30), values, 2.5) == pytest.approx(stats.median_abs_deviation(rest, scale="normal"), rel=1e-3)
    assert pytest.approx(1 / stats.norm.ppf(0.75), rel=1e-4) == MAD_TO_STANDARD_DEVIATION


@pytest.mark.parametrize(("values", "expected"), [([1.0] * 9, 0.0), ([], 0.0), ([3.0], 0.0), ([2.0, 1.0, 2.0], 0.0)])
def test_trend_of_constant_values_is_zero(values: list[float], expected: float):
    assert mann_kendall(values) == expected


def test_sen_is_robust_against_one_outlier():
    values = [float(i) for i in range(12)]
    values[5] = 1e12
    assert sen_slope(range(12), values) == pytest.approx(1.0, abs=0.3)


def test_sen_of_one_value_is_zero():
    assert sen_slope([1.0], [5.0]) == 0.0
    assert not math.isnan(sen_slope([1.0, 1.0], [1.0, 2.0]))
