"""Distributions, their differences and the thresholds of CI."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median, quantiles

import pytest

from gpumond.diagnosis.trend import quantile
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.pools import Receipt
from gpumond.features.baselines.recorder import MAX_WORKLOADS, BaselineRecorder
from gpumond.features.baselines.statistics import (
    MAX_PERIODS,
    Baseline,
    Difference,
    Distribution,
    MeasureDistribution,
    Periods,
    WorkloadMeasures,
    compare,
    estimate_shift,
    parse_measure_threshold,
)
from tests.helpers.agents import GIB
from tests.helpers.training import frame, training
from tests.helpers.values import make_device, make_process


def distribution_of(*values: float) -> Distribution:
    made = Periods()
    for value in values:
        made.add(value)
    found = made.distribution()
    assert found is not None
    return found


def test_distribution_of_few_values_keeps_them():
    found = distribution_of(5, 1, 3)
    assert (found.levels, found.peak, found.typical) == ((5, 1, 3), 5, 3)


@pytest.mark.parametrize("count", [MAX_PERIODS - 1, MAX_PERIODS, 10 * MAX_PERIODS + 1, 86_400])
def test_distribution_of_many_values_has_few_blocks_with_the_same_centre_and_peak(count: int):
    noise = random.Random(count)
    values = [noise.gauss(100, 5) for _ in range(count)]
    found = distribution_of(*values)
    assert MAX_PERIODS // 2 <= len(found.levels) <= MAX_PERIODS
    assert found.peak == max(values)
    assert found.typical == pytest.approx(median(values), abs=0.5)


def test_distribution_of_no_values_is_none():
    assert Periods().distribution() is None


def test_quantiles_are_those_of_the_standard_library():
    ordered = sorted(random.Random(1).random() for _ in range(37))
    assert [quantile(ordered, n / 20) for n in range(1, 20)] == pytest.approx(
        quantiles(ordered, n=20, method="inclusive")
    )


def test_shift_is_exact_and_inside_its_interval():
    noise = random.Random(2)
    before = [noise.gauss(0, 3) for _ in range(40)]
    moved, low, high = estimate_shift(before, [value + 7 for value in before])
    assert moved == pytest.approx(7, abs=1e-9)
    assert low is not None
    assert high is not None
    assert low < 7 < high


def test_shift_is_robust_against_a_quarter_of_outliers():
    noise = random.Random(3)
    before, after = [noise.gauss(0, 1) for _ in range(40)], [noise.gauss(5, 1) for _ in range(40)]
    moved, *_ = estimate_shift(before, after[:30] + [1000.0] * 10)
    assert 4 < moved < 7


def test_interval_has_a_coverage_of_95_percent():
    noise = random.Random(4)
    held = 0
    for _ in range(400):
        before, after = [noise.expovariate(1) for _ in range(25)], [noise.expovariate(1) + 2 for _ in range(30)]
        _, low, high = estimate_shift(before, after)
        assert low is not None
        assert high is not None
        held += low <= 2 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_interval_of_too_few_values_is_none():
    assert estimate_shift([1.0, 2.0], [2.0, 3.0]) == (1.0, None, None)


def side(retries: int | None = None, workload: str = "train", **levels: tuple[float, ...]) -> Baseline:
    measures = tuple(MeasureDistribution(name, distribution_of(*values)) for name, values in levels.items())
    return Baseline("n", None, 5.0, 3600, 3600, True, (WorkloadMeasures(workload, 3600, measures, retries),))


def by_name(before: Baseline, after: Baseline) -> dict[str, Difference]:
    return {f"{each.workload} {each.name}": each for each in compare(before, after).differences}


def test_comparison_has_the_difference_of_peaks_and_the_shift_of_typical_values():
    found = by_name(side(2, live=(10,) * 20 + (20,)), side(5, live=(15,) * 20 + (16,)))
    peak, typical, rate = (found[f"train {name}"] for name in ("live_peak", "live_typical", "retries_rate"))
    assert (peak.before, peak.after, peak.difference, peak.ratio) == (20, 16, -4, -0.2)
    assert (typical.difference, typical.ratio, typical.low, typical.high) == (5, 0.5, 5, 5)
    assert (rate.before, rate.after, rate.difference) == (2, 5, 3)


def test_value_of_one_side_only_has_no_difference():
    found = by_name(side(live=(1,)), side(workload="serve", live=(2,)))
    assert (found["train live_peak"].after, found["serve live_peak"].before) == (None, None)
    assert not [each for each in found.values() if each.difference is not None]


def make_difference(name: str, before: float, after: float) -> Difference:
    measure, _, stat = name.rpartition("_")
    ratio = (after - before) / before if before else None
    return Difference("train", measure, stat, before, after, after - before, ratio)


@pytest.mark.parametrize(
    ("text", "before", "after", "exceeded"),
    [
        ("live_peak>5%", 100, 105, False),
        ("live_peak>5%", 100, 106, True),
        ("live_peak>5%", 100, 50, False),
        ("live_peak>5%", 0, 1, True),
        ("live_peak>5%", 0, 0, False),
        ("held_typical>1GiB", 0, GIB, False),
        ("held_typical > 1GiB", 0, GIB + 1, True),
        ("utilization_typical<-10%", 0.8, 0.7, True),
        ("utilization_typical<-10%", 0.8, 0.75, False),
        ("retries_rate>0", 1, 1, False),
        ("retries_rate>0", 1, 2, True),
        ("live_peak<0", 5, 4, True),
    ],
)
def test_threshold_decides_on_a_difference(text: str, before: float, after: float, exceeded: bool):
    limit = parse_measure_threshold(text)
    assert limit.is_exceeded_by(make_difference(limit.name, before, after)) is exceeded
    assert limit.is_exceeded_by(make_difference("overhead_peak", 0, 1e12)) is False


@pytest.mark.parametrize(
    "text", ["", "live>5%", "live_peak=5%", "live_peak>lots", "love_peak>5%", "retries_peak>1", "live_rate>1"]
)
def test_invalid_threshold_is_refused(text: str):
    with pytest.raises(ValueError, match="expected"):
        parse_measure_threshold(text)


def measured(measuring: BaselineRecorder) -> dict[str, Distribution]:
    (workload,) = measuring.baseline().workloads
    return {each.measure: each.distribution for each in workload.measures}


def test_recording_of_a_workload_has_each_share():
    measuring = BaselineRecorder("n", 10)
    for second in range(11):
        measuring.add(training(second, (second % 2 + 1) * GIB, retries=5 + second))
    found = measured(measuring)
    peaks = {measure: each.peak / (1 if measure == "utilization" else GIB) for measure, each in found.items()}
    assert peaks == {
        "live": 2,
        "held": 4,
        "reclaimable": 1,
        "stranded": 1,
        "overhead": 5,
        "used": 8,
        "utilization": 0.5,
    }
    baseline = measuring.baseline()
    assert (baseline.complete, baseline.seconds, baseline.started_at) == (True, 10, 1000)
    assert (baseline.workloads[0].workload, baseline.workloads[0].retries) == ("train", 10)


def test_device_without_answer_adds_no_sample():
    measuring = BaselineRecorder("n", 10)
    measuring.add(training(0, GIB))
    measuring.add(training(1, 50 * GIB, missed_readings=1))
    assert measured(measuring)["live"].levels == (GIB,)


def test_program_without_an_agent_has_its_name_and_used_bytes():
    measuring = BaselineRecorder("n", 10)
    measuring.add(frame(0, make_device(used_bytes=GIB, processes=(make_process(comm="python", used_bytes=GIB),))))
    (workload,) = measuring.baseline().workloads
    assert (workload.workload, [each.measure for each in workload.measures], workload.retries) == (
        "[python]",
        ["used"],
        None,
    )


def test_recording_can_be_limited_to_one_workload():
    measuring = BaselineRecorder("n", 10, "serve")
    measuring.add(training(0, GIB))
    assert measuring.baseline().workloads == ()


def test_recording_has_flushes_and_released_bytes():
    measuring = BaselineRecorder("n", 10)
    measuring.add(training(0, GIB))
    receipt = Receipt(
        pid=10,
        workload="train",
        device_uuid="GPU-a",
        allocator="torch",
        outcome="freed",
        reason="",
        expected=None,
        released_bytes=5,
        driver_released_bytes=5,
        before=None,
        after=None,
        steps=(),
        raced=False,
        requested_by="x",
        started_at=0.0,
        duration_seconds=0.0,
    )
    measuring.add_receipt(receipt)
    measuring.add_receipt(replace(receipt, outcome="planned", released_bytes=99))
    measuring.add_receipt(replace(receipt, workload="another"))
    assert measured(measuring)["flush_yield"].levels == (5,)
    assert measuring.baseline().workloads[0].flushes == 1


def test_recording_is_bounded():
    measuring = BaselineRecorder("n", 10)
    processes = tuple(make_process(pid, GIB, comm=f"p{pid}") for pid in range(1, 3 * MAX_WORKLOADS))
    measuring.add(frame(0, make_device(used_bytes=900 * GIB, processes=processes)))
    assert len(measuring.baseline().workloads) == MAX_WORKLOADS


def test_baseline_round_trips_through_json():
    measuring = BaselineRecorder("n", 1, "train")
    for second in range(300):
        measuring.add(training(second, second * GIB // 7))
    assert from_json(Baseline, to_json(measuring.baseline())) == measuring.baseline()
