"""Scenarios of serving programs: N8 to N11 and P10. Pure.

Levels (GiB), durations and shares of busy time are those of the curves of a public inference fleet: GPU memory in use
of 51 GPUs of 48 GiB, 43 GPU-days, one sample every 57 s. A program rests while its value changes by less than 0.02 GiB
from sample to sample; else it is busy. 32 of the GPUs serve requests all day, and 9 others load and unload models. A
level is that of the device and contains the CUDA context.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.scenarios import pair, steadily
from gpumond.features.loadgen.script import CONTEXT_BYTES, Option, Script, every, scenario

DEVICE_BYTES = 48 * GIB
WEIGHTS_BYTES = 2 * GIB
"""Permanent memory of a program. The fleet's programs use more nearly all the time."""
HALF_BYTES = 32 * MIB
"""Half of a segment that slow fragmentation splits."""

QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
Levels = tuple[float, ...]
"""Used GiB at each of the quantiles."""


class Pattern(NamedTuple):
    """Rest and busy periods alternate. Their durations are log-normal: mean, and deviation of the logarithm."""

    rest_seconds: tuple[float, float]
    busy_seconds: tuple[float, float]
    rest_levels: Levels
    busy_levels: Levels


REQUESTS = Pattern(
    (10.8 * MINUTE_SECONDS, 1.65),
    (7.8 * MINUTE_SECONDS, 1.15),
    (13.3, 19.5, 21.1, 22.2, 24.2, 24.3, 24.5, 27.3, 34.6),
    (10.9, 12.9, 14.4, 18.0, 20.4, 22.1, 23.8, 24.3, 29.3),
)
"""The 32 GPUs that serve requests. The level of a busy program hardly depends on the previous sample (correlation 0.1).
"""
CHANGE_SECONDS = 30.0
"""Time between two levels of a busy program, which is less than that between two samples of the fleet."""
LONGEST_SECONDS = 5 * HOUR_SECONDS
"""Longest period on these GPUs."""

MODELS = Pattern(
    (68.2 * MINUTE_SECONDS, 1.0),
    (3.5 * MINUTE_SECONDS, 1.0),
    (0.0, 9.0, 14.6, 22.5, 25.3, 29.8, 31.2, 33.9, 39.1),
    (8.5, 11.0, 14.4, 20.9, 24.0, 26.2, 29.5, 30.9, 38.7),
)
"""The 9 GPUs that load models. The rest periods are those of a quarter of an hour or more: half of them lasted 19 to 83
minutes, and a twentieth at least four hours.
"""

BUSY_SHARES = (
    *(0.18, 0.81, 0.93, 0.82, 0.36, 0.86, 0.94, 0.97, 0.90, 0.75, 0.39, 0.29),
    *(0.30, 0.38, 0.21, 0.18, 0.08, 0.09, 0.05, 0.03, 0.02, 0.01, 0.02, 0.02),
)
"""Busy share of each hour of a day on the 32 GPUs, from the morning to the end of the night. The curves end after 23
hours; the last value repeats the one before.
"""
MEAN_BUSY_SHARE = 0.42

DRIFT_BYTES = (0.5 * GIB, 1.6 * GIB)
"""Growth in six hours. If the upper quartile of a curve of the fleet rises from six hours to the next six, it rises by
0.5 GiB in the median and by 1.6 GiB at the quantile 0.9.
"""
MAX_DRIFT_SECONDS = 15 * HOUR_SECONDS
"""Limit of the growth, so that at most 4 GiB are stranded: a fifth of the pool is not reported as fragmentation."""


INJECTED = Option("rate", "size", "no leak", "bytes leaked per minute")


@scenario(
    "serving-bimodal",
    "n8",
    "a serving program rests at one level and is busy at others, which change by gigabytes within minutes",
    "",
    shape=("‾‾‾| |‾‾| ‾‾", "   ||  |'|  ", "    |    |  "),
    options=(INJECTED,),
    neighbors=False,
    size_bytes=DEVICE_BYTES,
)
def bimodal(script: Script) -> None:
    """Serve requests with the mean busy share of a day at all times."""
    _serve(script, REQUESTS)
    _inject(script, script.number("rate", 0.0))


@scenario(
    "serving-nightly",
    "n9",
    "a serving program is busy by day, and rests most of the night",
    "",
    shape=("‾|'|||'|‾‾‾‾", " ||||||     ", "  | |       "),
    options=(INJECTED,),
    neighbors=False,
    size_bytes=DEVICE_BYTES,
)
def nightly(script: Script) -> None:
    _serve(script, REQUESTS, BUSY_SHARES)
    _inject(script, script.number("rate", 0.0))


@scenario(
    "model-loads",
    "n10",
    "models are loaded and unloaded, and stay for tens of minutes to hours",
    "",
    shape=("   ___    __", "  |   |  |  ", "__|   |__|  "),
    options=(INJECTED,),
    neighbors=False,
    size_bytes=DEVICE_BYTES,
)
def model_loads(script: Script) -> None:
    _serve(script, MODELS)
    _inject(script, script.number("rate", 0.0))


@scenario(
    "leak-serving",
    "p10",
    "a serving program as in serving-bimodal leaks",
    "leak",
    shape=("        _.|'||", "   _|''|| |  ", "||'| |        "),
    options=(Option("rate", "size", "16, 32, 64, 128 or 256 MiB", "bytes leaked per minute", 1),),
    neighbors=False,
    size_bytes=DEVICE_BYTES,
)
def leak(script: Script) -> None:
    """Leak in the program of `bimodal`, which always holds more than 1 GiB."""
    rate = script.number("rate", script.dice.choice((16, 32, 64, 128, 256)) * MIB)
    _serve(script, REQUESTS)
    _inject(script, rate)


@scenario(
    "slow-fragmentation",
    "n11",
    "live memory is constant, and the allocator holds slowly more, up to a limit",
    "",
    shape=("held   __..--", "  __--''     ", "live ---------"),
    options=(
        Option("step", "size", "0.5 to 1.6 GiB", "growth of the held memory in six hours", 1, DRIFT_BYTES[1]),
        Option("over", "duration", "6 to 15 h", "time until the growth ends", 60.0, MAX_DRIFT_SECONDS),
        INJECTED,
    ),
    neighbors=False,
    size_bytes=DEVICE_BYTES,
)
def slow_fragmentation(script: Script) -> None:
    """Free halves of a limited number of segments. Their successors are larger than the holes."""
    end = script.last(24 * HOUR_SECONDS)
    growth = script.number("step", script.dice.uniform(*DRIFT_BYTES))
    over = script.number("over", script.dice.uniform(6 * HOUR_SECONDS, MAX_DRIFT_SECONDS))
    live = script.dice.uniform(16, 22) * GIB
    program = script.program("load")
    count = math.ceil(growth * over / (6 * HOUR_SECONDS) / HALF_BYTES)
    halves = [pair(script, 1.0, HALF_BYTES)[1] for _ in range(count)]
    ready = script.fill(5.0, live - 2 * HALF_BYTES * count, 20.0)
    onset = ready + script.dice.uniform(0.5, 3.0) * HOUR_SECONDS
    for number, half in enumerate(halves):
        at = onset + over * number / count
        script.free(at, half)
        script.allocate(at, HALF_BYTES + 2 * MIB)
    requests = _ResizedBlock(script)
    for at in every(ready, end, MINUTE_SECONDS):
        requests.to(at, script.dice.uniform(1, 3) * GIB)
        script.busy(at, script.dice.uniform(0.3, 0.9), program)
    _inject(script, script.number("rate", 0.0))


class _ResizedBlock:
    """A block whose size changes. The freed memory is returned to the device, as in the fleet."""

    def __init__(self, script: Script) -> None:
        self._script, self._block = script, 0

    def to(self, at: float, size: float) -> None:
        if self._block:
            self._script.free(at, self._block)
            self._script.flush(at)
        self._block = self._script.allocate(at, size)


def _serve(script: Script, pattern: Pattern, busy_shares: Sequence[float] = (MEAN_BUSY_SHARE,)) -> None:
    """Alternate between rest and busy periods for 24 hours. ``busy_shares``: busy share of each hour of a day.

    A share changes the durations of both: their ratio is that of busy to rest in the hour.
    """
    end = script.last(24 * HOUR_SECONDS)
    morning = script.dice.uniform(0, 24)
    course, use = script.random("course"), script.random("utilisation")
    program = script.program("load")
    script.fill(1.0, WEIGHTS_BYTES, 20.0)
    work, busy, until = _ResizedBlock(script), True, 0.0
    for at in every(30.0, end, CHANGE_SECONDS):
        change = at >= until
        if change:
            busy = not busy
            share = busy_shares[int(morning + at / HOUR_SECONDS) % len(busy_shares)]
            odds = share / (1 - share) * (1 - MEAN_BUSY_SHARE) / MEAN_BUSY_SHARE
            seconds = _duration(course, pattern, busy) * (odds if busy else 1 / odds) ** 0.5
            until = at + min(LONGEST_SECONDS, seconds)
        if busy or change:
            used = _level(course, pattern.busy_levels if busy else pattern.rest_levels) * GIB
            work.to(at, max(0.0, used - WEIGHTS_BYTES - CONTEXT_BYTES))
        script.busy(at, use.uniform(0.5, 0.9) if busy else use.uniform(0.0, 0.1), program)


def _duration(dice: Random, pattern: Pattern, busy: bool) -> float:
    mean, deviation = pattern.busy_seconds if busy else pattern.rest_seconds
    return dice.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)


def _level(dice: Random, levels: Levels) -> float:
    """Return a random level: linear between the quantiles, and none below the first or above the last."""
    share = min(max(dice.random(), QUANTILES[0]), QUANTILES[-1])
    place = bisect_left(QUANTILES, share, 1)
    (low, high), (before, after) = QUANTILES[place - 1 : place + 1], levels[place - 1 : place + 1]
    return before + (after - before) * (share - low) / (high - low)


def _inject(script: Script, rate: float) -> None:
    """Leak ``rate`` bytes a minute from 4 to 10 hours after the start on, as `bench.leaks` does in recorded curves."""
    onset = script.random("onset").uniform(4, 10) * HOUR_SECONDS
    if rate:
        steadily(script, onset, rate / MINUTE_SECONDS)
