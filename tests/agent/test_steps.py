"""``step``: the count of steps, and the trend of the bytes that each keeps."""

from __future__ import annotations

import random

import pytest

from gpumond import agent
from gpumond.agent.measure.steps import MIN_SAMPLES, STEPS, TREND_SAMPLES, StepCounter, StepSample, trend
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import MIB


def samples(live: list[int], every: int = 10) -> list[StepSample]:
    return [StepSample(number * every, float(number), bytes_, 0, 0) for number, bytes_ in enumerate(live)]


def test_steps_are_counted_and_sampled_at_most_once_a_second(allocator: CachingAllocator):
    assert agent.program().step is None
    allocator.malloc(100 * MIB)
    for _ in range(1000):
        agent.step()
        allocator.malloc(MIB // 8)
    step = agent.program().step
    assert step is not None
    assert (step.steps, step.live_bytes, step.retries) == (1000, 100 * MIB, 0)
    assert len(STEPS._samples) == 1


def test_bytes_kept_by_each_step_are_a_trend(allocator: CachingAllocator):
    steps = StepCounter()
    for _ in range(3 * TREND_SAMPLES):
        allocator.malloc(2 * MIB)
        steps._next_sample_at = 0.0  # a second has passed
        steps.mark()
    usage = steps.usage()
    assert usage is not None
    assert usage.retained_bytes == 2 * MIB
    assert usage.live_bytes == 3 * TREND_SAMPLES * 2 * MIB
    assert usage.steps_per_second is not None


@pytest.mark.parametrize(
    ("live", "kept"),
    [
        ([100] * TREND_SAMPLES, 0.0),
        (list(range(0, 30 * TREND_SAMPLES, 30)), 3.0),
        ([0, *[5000] * (TREND_SAMPLES - 1)], 0.0),  # a warm-up
        ([*[100] * 9, 90_000, *[100] * 10], 0.0),  # an evaluation was under way
        ([100] * (MIN_SAMPLES - 1), None),
    ],
)
def test_outlier_is_no_trend(live: list[int], kept: float | None):
    assert trend(samples(live)) == kept


def test_noise_is_no_trend_and_hides_none():
    rng = random.Random(5)
    noise = [rng.randrange(-1000, 1000) for _ in range(TREND_SAMPLES)]
    leak = [100 * number + shift for number, shift in enumerate(noise)]
    assert abs(trend(samples([10_000 + n for n in noise])) or 0) < 6
    assert abs((trend(samples(leak)) or 0) - 10) < 6


def test_step_without_an_allocator_counts(allocator: CachingAllocator):
    allocator.close()
    agent.step()
    step = agent.program().step
    assert step is not None
    assert (step.steps, step.live_bytes, step.retained_bytes) == (1, 0, None)
