"""``step()``: counts the program's steps, and reads the memory at the end of a step, at most once a second.

Between two samples a step costs one counter and one clock. The trend is computed when a report requests it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, count
from typing import NamedTuple

from gpumond.agent.loaded_allocators import ALLOCATORS
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import StepUsage

READ_TIMEOUT_SECONDS = 0.01
"""Longest wait for another reading to end. A flush takes longer, and is not waited for."""


class DeviceUsage(NamedTuple):
    """The memory use on one device.

    ``peak_bytes`` is the allocators' own peak since the start, None if one of them has none. ``is_only_pool``: the
    device has no other pool, so the pool's peak is the device's.
    """

    live_bytes: int = 0
    stranded_bytes: int = 0
    peak_bytes: int | None = 0
    retries: int = 0
    is_only_pool: bool = True


NO_USAGE = DeviceUsage()
"""The usage of a device on which nothing has been allocated yet."""

UsageByDevice = Mapping[str, DeviceUsage]


def usage_by_device(pools: Iterable[PoolUsage]) -> dict[str, DeviceUsage]:
    """Return the usage by device. A pool inside another is counted there; one with unknown live bytes has none."""
    by_device: dict[str, DeviceUsage] = {}
    for pool in pools:
        if pool.inside is not None or pool.live_bytes is None:
            continue
        usage = DeviceUsage(pool.live_bytes, pool.stranded_bytes, pool.peak_live_bytes, pool.retries or 0)
        previous = by_device.get(pool.device_uuid)
        by_device[pool.device_uuid] = usage if previous is None else _add_usage(previous, usage)
    return by_device


def read_usage() -> dict[str, DeviceUsage] | None:
    """Return the current usage; None while a flush is in progress. Never raises."""
    try:
        pools = ALLOCATORS.read(READ_TIMEOUT_SECONDS)
    except Exception:  # an error of an allocator, which the program did not call
        return None
    return None if pools is None else usage_by_device(pools)


def _add_usage(one: DeviceUsage, other: DeviceUsage) -> DeviceUsage:
    peaks = (one.peak_bytes, other.peak_bytes)
    return DeviceUsage(
        one.live_bytes + other.live_bytes,
        one.stranded_bytes + other.stranded_bytes,
        None if None in peaks else sum(peak or 0 for peak in peaks),
        one.retries + other.retries,
        is_only_pool=False,
    )


SAMPLE_INTERVAL_SECONDS = 1.0
TREND_SAMPLES = 20
"""Number of samples in a trend: 190 pairs, about 30 microseconds."""

MIN_SAMPLES = 8


class StepSample(NamedTuple):
    step: int
    at: float
    live_bytes: int
    stranded_bytes: int
    retries: int


class StepCounter:
    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._step_numbers = count(1)
        self.steps = 0
        self._next_sample_at = 0.0
        self._first_retries: int | None = None
        self._samples: deque[StepSample] = deque(maxlen=TREND_SAMPLES)

    def mark(self) -> None:
        self.steps = next(self._step_numbers)
        now = time.monotonic()
        if now >= self._next_sample_at:
            self._next_sample_at = now + SAMPLE_INTERVAL_SECONDS
            self._sample(now)

    def usage(self) -> StepUsage | None:
        """Return None before the first step."""
        samples = tuple(self._samples)
        if not self.steps:
            return None
        if not samples:
            return StepUsage(steps=self.steps)
        newest = samples[-1]
        retries = max(0, newest.retries - (self._first_retries or 0))
        return StepUsage(
            steps=self.steps,
            steps_per_second=_steps_per_second(samples),
            retained_bytes=trend(samples),
            live_bytes=newest.live_bytes,
            stranded_bytes=newest.stranded_bytes,
            retries=retries,
        )

    def _sample(self, now: float) -> None:
        usage = read_usage()
        if usage is None:
            return
        live, stranded, retries = (
            sum(device_usage.live_bytes for device_usage in usage.values()),
            sum(device_usage.stranded_bytes for device_usage in usage.values()),
            sum(device_usage.retries for device_usage in usage.values()),
        )
        if self._first_retries is None:
            self._first_retries = retries
        self._samples.append(StepSample(self.steps, now, live, stranded, retries))


def trend(samples: Sequence[StepSample]) -> float | None:
    """Return the growth of live memory in bytes for each step: the median slope of all pairs (Theil 1950, Sen 1968)."""
    if len(samples) < MIN_SAMPLES:
        return None
    slopes = sorted(
        (later.live_bytes - earlier.live_bytes) / (later.step - earlier.step)
        for earlier, later in combinations(samples, 2)
        if later.step > earlier.step
    )
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


def _steps_per_second(samples: Sequence[StepSample]) -> float | None:
    """Return the steps per second over the samples."""
    seconds = samples[-1].at - samples[0].at
    return (samples[-1].step - samples[0].step) / seconds if seconds > 0 else None


STEPS = StepCounter()
