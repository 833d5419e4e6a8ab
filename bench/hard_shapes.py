"""Memory curves that are hard to judge: healthy ones that grow, and leaks that pause, jump or accelerate.

A shape is drawn from rng. Its functions take seconds since the start of the program; sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log1p, pi, sin
from random import Random

MIB, GIB = 1 << 20, 1 << 30
MINUTE, HOUR = 60.0, 3600.0
DEVICE_BYTES = 80 * GIB

Curve = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``kept``: live bytes at the end of a step. ``activations``: what a step allocates and frees above them.

    ``step_seconds``: duration of a step, None for a program that counts none. ``stepping``: whether steps are done now.
    ``sticky``: the pool keeps what was freed. ``load``: running requests and used ratio of the KV cache, of an engine.
    ``onset``: the time from which on it leaks. ``lives``: number of times that the program is started again.
    ``noise``: standard deviation of the driver's count. ``outside``: bytes outside the pools.
    """

    kept: Curve
    activations: Curve = lambda at: GIB / 4
    step_seconds: float | None = None
    stepping: Callable[[float], bool] = lambda at: True
    sticky: bool = True
    busy: Curve = lambda at: 0.7
    load: Callable[[float], tuple[int, float]] | None = None
    onset: float = inf
    hours: float = 4.0
    lives: int = 1
    noise: float = 8 * MIB
    outside: Curve = lambda at: 600 * MIB
    accelerates: bool = False
    every: float = 1.5
    """Seconds between two samples."""


Maker = Callable[[Random], Shape]


def _between(rng: Random, low: float, high: float) -> float:
    return low * (high / low) ** rng.random()


def _base(rng: Random) -> float:
    return rng.uniform(8, 30) * GIB


def _loading(base: float, seconds: float, then: Curve) -> Curve:
    """Load the model for some seconds first."""
    return lambda at: base * at / seconds if at < seconds else base + then(at - seconds)


def _started(rng: Random, then: Curve, **fields: object) -> Shape:
    return Shape(kept=_loading(_base(rng), rng.uniform(15, 90), then), **fields)  # type: ignore[arg-type]


def _ramps(times: list[float], heights: list[float], seconds: float = 5.0) -> Curve:
    """Return the sum of rises at these times."""
    totals = [0.0]
    for height in heights:
        totals.append(totals[-1] + height)

    def curve(at: float) -> float:
        done = bisect_right(times, at)
        partly = min(1.0, (at - times[done - 1]) / seconds) if done else 0.0
        return totals[max(0, done - 1)] + (totals[done] - totals[max(0, done - 1)]) * partly if done else 0.0

    return curve


def _arrivals(rng: Random, mean: float, until: float, start: float = 0.0) -> list[float]:
    times, at = [], start
    while True:
        at += rng.expovariate(1 / mean)
        if at > until:
            return times
        times.append(at)


def _steps(rng: Random) -> float:
    return _between(rng, 0.3, 6)


def _serving_noise(rng: Random, high: float, mean_seconds: float = 400) -> Curve:
    """Return load that changes between levels."""
    times = _arrivals(rng, mean_seconds, 12 * HOUR)
    levels = [high * rng.betavariate(1.5, 1.5) for _ in range(len(times) + 1)]
    return lambda at: levels[bisect_right(times, at)]


# Healthy


def hyperbolic_cache(rng: Random) -> Shape:
    size, tau = rng.uniform(10, 35) * GIB, _between(rng, 15, 120) * MINUTE
    return _started(rng, lambda at: size * at / (at + tau), hours=5)


def keys_power(rng: Random) -> Shape:
    size, power = rng.uniform(8, 30) * GIB, rng.uniform(0.5, 0.68)
    return _started(rng, lambda at: size * (at / (5 * HOUR)) ** power, hours=5)


def slow_warm_up(rng: Random) -> Shape:
    size, tau = rng.uniform(5, 30) * GIB, _between(rng, 15, 70) * MINUTE
    return _started(rng, lambda at: size * (1 - exp(-at / tau)), hours=4)


def slow_warm_up_stepped(rng: Random) -> Shape:
    return replace(slow_warm_up(rng), step_seconds=_steps(rng))


def logarithm(rng: Random) -> Shape:
    size, tau = rng.uniform(2, 8) * GIB, _between(rng, 2, 20) * MINUTE
    return _started(rng, lambda at: size * log1p(at / tau), hours=5)


def saturating_keys(rng: Random) -> Shape:
    """Distinct entries of a finite catalog, requested at random."""
    count, size, mean = rng.randint(60, 400), rng.uniform(30, 120) * MIB, _between(rng, 5, 30)
    seen, times = set[int](), []
    for at in _arrivals(rng, mean, 5 * HOUR):
        key = int(count * rng.random() ** 1.5)
        if key not in seen:
            seen.add(key)
            times.append(at)
    return _started(rng, _ramps(times, [size] * len(times)), hours=5)


def cache_fills_and_stops(rng: Random) -> Shape:
    start, fill, size = rng.uniform(10, 45) * MINUTE, rng.uniform(15, 70) * MINUTE, rng.uniform(6, 30) * GIB
    return _started(rng, lambda at: size * min(1.0, max(0.0, (at - start) / fill)), hours=3.5)


def cache_fills_from_start(rng: Random) -> Shape:
    fill, size = rng.uniform(8, 40) * MINUTE, rng.uniform(6, 30) * GIB
    return _started(rng, lambda at: size * min(1.0, at / fill), hours=3)


def replay_buffer(rng: Random) -> Shape:
    fill, size = rng.uniform(30, 120) * MINUTE, rng.uniform(8, 30) * GIB
    return _started(rng, lambda at: size * min(1.0, at / fill), hours=4, step_seconds=_steps(rng))


def first_epoch_cache(rng: Random) -> Shape:
    epoch, size = rng.uniform(6, 40) * MINUTE, rng.uniform(3, 25) * GIB
    return _started(rng, lambda at: size * min(1.0, at / epoch), hours=3, step_seconds=_steps(rng))


def first_epoch_cache_uncounted(rng: Random) -> Shape:
    return replace(first_epoch_cache(rng), step_seconds=None)


def adapters(rng: Random) -> Shape:
    times = sorted(_arrivals(rng, _between(rng, 40, 200), 5 * HOUR))[: rng.randint(12, 48)]
    size = rng.uniform(80, 400) * MIB
    return _started(rng, _ramps(times, [size] * len(times)), hours=3.5)


def unfreezing(rng: Random) -> Shape:
    epoch, count = rng.uniform(5, 20) * MINUTE, rng.randint(4, 8)
    heights = [rng.uniform(0.5, 2.5) * GIB for _ in range(count)]
    times = [epoch * (i + 1) for i in range(count)]
    return _started(rng, _ramps(times, heights), hours=4, step_seconds=_steps(rng))


def _teeth(rng: Random, low: float, high: float, size: tuple[float, float] = (2, 14), **fields: object) -> Shape:
    length, height = rng.uniform(low, high) * MINUTE, rng.uniform(*size) * GIB
    return _started(rng, lambda at: height * (at % length) / length, sticky=False, **fields)


def teeth_short(rng: Random) -> Shape:
    return _teeth(rng, 3, 15, hours=2)


def teeth_stepped(rng: Random) -> Shape:
    return _teeth(rng, 5, 30, hours=2.5, step_seconds=_steps(rng))


def teeth_long(rng: Random) -> Shape:
    return _teeth(rng, 20, 40, hours=3)


def teeth_after_rest(rng: Random) -> Shape:
    rest, inner = rng.uniform(8, 20) * MINUTE, _teeth(rng, 5, 15, hours=2.5)
    return replace(inner, kept=lambda at: inner.kept(min(at, 90.0)) if at < rest else inner.kept(at - rest + 90.0))


def prefetch_queue(rng: Random) -> Shape:
    fill, size = rng.uniform(4, 14) * MINUTE, rng.uniform(2, 12) * GIB
    return _started(rng, lambda at: size * min(1.0, at / fill), hours=1.5, step_seconds=rng.choice((None, 1.0)))


def generations(rng: Random) -> Shape:
    times, at = [], 6 * MINUTE
    while at < 5 * HOUR:
        length = rng.uniform(15, 40) * MINUTE
        times.append((at, length, rng.uniform(3, 15) * GIB))
        at += length + rng.uniform(5, 15) * MINUTE

    def curve(at: float) -> float:
        i = bisect_right(times, (at, inf, inf)) - 1
        if i < 0 or at > times[i][0] + times[i][1]:
            return 0.0
        return times[i][2] * (at - times[i][0]) / times[i][1]

    return _started(rng, curve, hours=4, sticky=False)


def longer_sequences(rng: Random) -> Shape:
    high, hours = rng.uniform(8, 30) * GIB, rng.uniform(1, 4) * HOUR
    return _started(
        rng,
        lambda at: 0.0,
        hours=4,
        step_seconds=_steps(rng),
        activations=lambda at: 3 * GIB + high * min(1.0, at / hours),
    )


def larger_images(rng: Random) -> Shape:
    stage, height = rng.uniform(10, 30) * MINUTE, rng.uniform(1, 5) * GIB
    return _started(
        rng,
        lambda at: 0.0,
        hours=4,
        step_seconds=_steps(rng),
        activations=lambda at: 3 * GIB + height * min(8, at // stage),
    )


def longer_answers(rng: Random) -> Shape:
    high, power = rng.uniform(8, 25) * GIB, rng.uniform(0.7, 1.5)
    return _started(
        rng,
        lambda at: 0.0,
        hours=4,
        step_seconds=_between(rng, 5, 40),
        activations=lambda at: 2 * GIB + high * (at / (4 * HOUR)) ** power,
    )


def curriculum(rng: Random) -> Shape:
    times = sorted(rng.uniform(10, 210) * MINUTE for _ in range(3))
    return _started(rng, _ramps(times, [rng.uniform(2, 8) * GIB for _ in times]), hours=4, step_seconds=_steps(rng))


def sweep(rng: Random) -> Shape:
    """Trials of one process, each with a larger model than the one before, until the sweep starts again."""
    length, count = rng.uniform(8, 30) * MINUTE, rng.randint(4, 7)
    sizes = sorted(rng.uniform(2, 25) * GIB for _ in range(count))
    return _started(rng, lambda at: sizes[int(at // length) % count], hours=4, sticky=False, step_seconds=_steps(rng))


def rising_requests(rng: Random) -> Shape:
    """Continuous batching: the card is busy all the time, while more and more requests run."""
    rise, high = rng.uniform(1, 4) * HOUR, rng.uniform(10, 35) * GIB
    noise = _serving_noise(rng, 0.1, 120)

    def share(at: float) -> float:
        return min(1.0, 0.1 + 0.9 * at / rise) * (0.9 + noise(at))

    return _started(
        rng,
        lambda at: high * share(at),
        busy=lambda at: 0.97,
        load=lambda at: (int(200 * share(at)), min(1.0, 0.8 * share(at))),
        sticky=False,
    )


def morning(rng: Random) -> Shape:
    """Load that rises for hours, with the utilization."""
    rise, high, start = rng.uniform(1.5, 3.5) * HOUR, rng.uniform(8, 25) * GIB, rng.uniform(10, 60) * MINUTE
    noise = _serving_noise(rng, 0.25, 200)

    def share(at: float) -> float:
        return min(1.0, max(0.0, (at - start) / rise))

    return _started(
        rng,
        lambda at: high * share(at) * (0.85 + noise(at)),
        busy=lambda at: min(1.0, 0.15 + 0.7 * share(at) + 0.2 * noise(at)),
        sticky=False,
    )


def wave(rng: Random) -> Shape:
    period, high, phase = rng.uniform(3, 6) * HOUR, rng.uniform(3, 12) * GIB, rng.random()
    noise = _serving_noise(rng, 2 * GIB)
    return _started(
        rng,
        lambda at: high * (1 + sin(2 * pi * (at / period + phase))) / 2 + noise(at),
        busy=lambda at: 0.3 + 0.5 * (1 + sin(2 * pi * (at / period + phase))) / 2,
        hours=8,
        every=5.0,
        sticky=False,
    )


def model_load(rng: Random) -> Shape:
    at_, height = rng.uniform(40, 150) * MINUTE, rng.uniform(0.06, 0.2) * DEVICE_BYTES
    noise = _serving_noise(rng, rng.uniform(1, 4) * GIB)
    return _started(
        rng, lambda at: noise(at) + height * min(1.0, max(0.0, (at - at_) / 40)), hours=5, every=5.0, sticky=False
    )


def model_loads(rng: Random) -> Shape:
    times = sorted(rng.uniform(30, 200) * MINUTE for _ in range(2))
    noise = _serving_noise(rng, rng.uniform(1, 4) * GIB)
    rises = _ramps(times, [rng.uniform(2, 10) * GIB for _ in times], 40)
    return _started(rng, lambda at: noise(at) + rises(at), hours=5, every=5.0, sticky=False)


def model_load_quiet(rng: Random) -> Shape:
    times = [rng.uniform(20, 100) * MINUTE]
    return _started(rng, _ramps(times, [rng.uniform(2, 15) * GIB], rng.uniform(20, 300)), hours=2.5)


def steady_training(rng: Random) -> Shape:
    act = rng.uniform(2, 20) * GIB
    return _started(rng, lambda at: 0.0, activations=lambda at: act, step_seconds=_steps(rng), hours=2)


def checkpoints(rng: Random) -> Shape:
    every, height = rng.uniform(8, 40) * MINUTE, rng.uniform(1, 10) * GIB
    return _started(
        rng, lambda at: height if at % every > every - 50 else 0.0, hours=3, step_seconds=_steps(rng), sticky=False
    )


def evaluations(rng: Random) -> Shape:
    every, length = rng.uniform(15, 40) * MINUTE, rng.uniform(3, 10) * MINUTE
    height = rng.uniform(4, 18) * GIB

    def curve(at: float) -> float:
        return height * max(0.0, (at % every) - (every - length)) / length

    return _started(
        rng, curve, hours=3, step_seconds=_steps(rng), stepping=lambda at: at % every < every - length, sticky=False
    )


def evaluations_uncounted(rng: Random) -> Shape:
    return replace(evaluations(rng), step_seconds=None)


def notebook(rng: Random) -> Shape:
    level, times, levels = 1 * GIB, _arrivals(rng, 240, 4 * HOUR), [1.0 * GIB]
    for _ in times:
        level = min(45 * GIB, max(0.5 * GIB, level + rng.gauss(0.4, 3) * GIB))
        levels.append(level)
    return Shape(kept=lambda at: levels[bisect_right(times, at)], busy=lambda at: 0.2, hours=4, sticky=False)


def arena_records(rng: Random) -> Shape:
    """The arena keeps the largest request so far."""
    times, high, rises, heights = _arrivals(rng, 20, 5 * HOUR), 0.0, [], []
    for at in times:
        need = rng.lognormvariate(0, 0.8) * GIB
        if need > high:
            rises.append(at)
            heights.append(need - high)
            high = need
    return _started(rng, _ramps(rises, heights), hours=5)


def restarts(rng: Random) -> Shape:
    size, tau = rng.uniform(5, 20) * GIB, rng.uniform(1, 4) * MINUTE
    return _started(rng, lambda at: size * (1 - exp(-at / tau)), hours=0.5, lives=6)


def compiled_shapes(rng: Random) -> Shape:
    """Outside the pools: one graph for each new shape, of which there is a finite number."""
    count, size, seen, times = rng.randint(20, 80), rng.uniform(40, 150) * MIB, set[int](), []
    for at in _arrivals(rng, _between(rng, 10, 40), 4 * HOUR):
        key = int(count * rng.random() ** 2)
        if key not in seen:
            seen.add(key)
            times.append(at)
    graphs = _ramps(times, [size] * len(times))
    return _started(rng, lambda at: 0.0, outside=lambda at: 600 * MIB + graphs(at), hours=4)


def index_build(rng: Random) -> Shape:
    start, fill, size = rng.uniform(0, 15) * MINUTE, rng.uniform(35, 90) * MINUTE, rng.uniform(8, 30) * GIB
    return _started(rng, lambda at: size * min(1.0, max(0.0, (at - start) / fill)), hours=3)


def lazy_optimizer(rng: Random) -> Shape:
    tau, size = rng.uniform(1, 5) * MINUTE, rng.uniform(4, 20) * GIB
    return _started(rng, lambda at: size * min(1.0, at / tau), hours=1.5, step_seconds=_steps(rng))


def expiring_cache(rng: Random) -> Shape:
    """Entries expire after a time: grows in a line until then."""
    expiry, size = rng.uniform(10, 40) * MINUTE, rng.uniform(3, 20) * GIB
    noise = _serving_noise(rng, 0.1, 120)
    return _started(rng, lambda at: size * min(1.0, at / expiry) * (0.95 + noise(at)), hours=3, sticky=False)


def sleeping_engine(rng: Random) -> Shape:
    awake, asleep, size = rng.uniform(10, 40) * MINUTE, rng.uniform(5, 20) * MINUTE, rng.uniform(20, 60) * GIB
    return Shape(
        kept=lambda at: size if at % (awake + asleep) < awake else 1.2 * GIB,
        busy=lambda at: 0.6 if at % (awake + asleep) < awake else 0.0,
        hours=3,
        sticky=False,
    )


def bimodal_serving(rng: Random) -> Shape:
    noise = _serving_noise(rng, rng.uniform(4, 14) * GIB, rng.uniform(100, 900))
    return _started(rng, noise, hours=6, every=5.0, sticky=False)


def slowing_stairs(rng: Random) -> Shape:
    """Each shard of a table is loaded when it is first asked for, and later ones are asked for less often."""
    times, at, pause = [], 3 * MINUTE, rng.uniform(2, 5) * MINUTE
    while at < 5 * HOUR:
        times.append(at)
        at += pause
        pause *= rng.uniform(1.1, 1.3)
    return _started(rng, _ramps(times, [rng.uniform(0.5, 2) * GIB] * len(times)), hours=5)


def growing_context(rng: Random) -> Shape:
    """One conversation whose KV cache grows until it is cut."""
    length, height = rng.uniform(10, 35) * MINUTE, rng.uniform(2, 10) * GIB

    def curve(at: float) -> float:
        return height * min(1.0, at / length) if at < 1.5 * HOUR else height * min(1.0, (at - 1.5 * HOUR) / length)

    return _started(rng, curve, hours=3, sticky=False)


HEALTHY: Mapping[str, Maker] = {
    one.__name__: one
    for one in (
        hyperbolic_cache,
        keys_power,
        slow_warm_up,
        slow_warm_up_stepped,
        logarithm,
        saturating_keys,
        cache_fills_and_stops,
        cache_fills_from_start,
        replay_buffer,
        first_epoch_cache,
        first_epoch_cache_uncounted,
        adapters,
        unfreezing,
        teeth_short,
        teeth_stepped,
        teeth_long,
        teeth_after_rest,
        prefetch_queue,
        generations,
        longer_sequences,
        larger_images,
        longer_answers,
        curriculum,
        sweep,
        rising_requests,
        morning,
        wave,
        model_load,
        model_loads,
        model_load_quiet,
        steady_training,
        checkpoints,
        evaluations,
        evaluations_uncounted,
        notebook,
        arena_records,
        restarts,
        compiled_shapes,
        index_build,
        lazy_optimizer,
        expiring_cache,
        sleeping_engine,
        bimodal_serving,
        slowing_stairs,
        growing_context,
    )
}
NEVER = [
    "hyperbolic_cache",
    "keys_power",
    "slow_warm_up",
    "slow_warm_up_stepped",
    "logarithm",
    "saturating_keys",
    "compiled_shapes",
    "slowing_stairs",
    "model_load",
    "model_load_quiet",
    "teeth_short",
    "teeth_stepped",
    "teeth_long",
    "first_epoch_cache",
    "first_epoch_cache_uncounted",
    "longer_sequences",
    "larger_images",
    "longer_answers",
]
"""Shapes none of which may be called a leak: caches that slow down, one step, first teeth, a first epoch, and
activations."""
STOPPING = [
    "cache_fills_and_stops",
    "cache_fills_from_start",
    "replay_buffer",
    "first_epoch_cache",
    "adapters",
    "unfreezing",
    "index_build",
    "expiring_cache",
]
"""Shapes that fill and stop, none of which may be called a leak in a second life."""


# Leaks


def _leak(rng: Random, rate: tuple[float, float], onset: tuple[float, float], **fields: object) -> Shape:
    """Grow in a line, by MiB a minute, from a minute between ``onset`` on."""
    slope, begin = _between(rng, *rate) * MIB / MINUTE, rng.uniform(*onset) * MINUTE
    hours = min(8.0, (begin + 60 * GIB / slope) / HOUR)
    return _started(rng, lambda at: slope * max(0.0, at - begin), onset=begin, hours=hours, **fields)


def by_step_from_start(rng: Random) -> Shape:
    return _leak(rng, (60, 500), (0, 0.01), step_seconds=_steps(rng))


def by_step_after_rest(rng: Random) -> Shape:
    return _leak(rng, (60, 600), (10, 60), step_seconds=_steps(rng))


def by_step_large_activations(rng: Random) -> Shape:
    act = rng.uniform(8, 25) * GIB
    return _leak(rng, (60, 400), (0, 30), step_seconds=_steps(rng), activations=lambda at: act)


def by_step_growing_activations(rng: Random) -> Shape:
    shape = _leak(rng, (60, 300), (10, 40), step_seconds=_steps(rng))
    return replace(shape, activations=lambda at: 2 * GIB + 6 * GIB * min(1.0, at / HOUR))


def slow_from_rest(rng: Random) -> Shape:
    return _leak(rng, (20, 60), (20, 60))


def fast_from_rest(rng: Random) -> Shape:
    return _leak(rng, (250, 1000), (12, 40))


def from_start(rng: Random) -> Shape:
    return _leak(rng, (60, 300), (0, 0.01))


def fast_from_start(rng: Random) -> Shape:
    return _leak(rng, (300, 900), (0, 0.01))


def late(rng: Random) -> Shape:
    return _leak(rng, (60, 400), (110, 200))


def after_warm_up(rng: Random) -> Shape:
    size, tau = rng.uniform(2, 10) * GIB, rng.uniform(1, 6) * MINUTE
    shape = _leak(rng, (60, 300), (25, 45))
    return replace(shape, kept=lambda at: shape.kept(at) + size * (1 - exp(-at / tau)))


def _stairs(rng: Random, pause: tuple[float, float], height: tuple[float, float], **fields: object) -> Shape:
    every, size = rng.uniform(*pause) * MINUTE, _between(rng, *height) * MIB
    rate, begin = size / every, rng.uniform(2, 20) * MINUTE
    hours = min(10.0, (begin + 60 * GIB / rate) / HOUR)
    return _started(
        rng,
        lambda at: size * max(0, (at - begin) // every + 1) if at > begin else 0.0,
        onset=begin,
        hours=hours,
        **fields,
    )


def by_epoch(rng: Random) -> Shape:
    return _stairs(rng, (3, 10), (200, 900), step_seconds=_steps(rng))


def by_epoch_uncounted(rng: Random) -> Shape:
    return _stairs(rng, (3, 12), (300, 1500))


def by_long_epoch(rng: Random) -> Shape:
    return _stairs(rng, (15, 40), (4500, 9000), step_seconds=_steps(rng))


def by_request(rng: Random) -> Shape:
    mean, size = _between(rng, 2, 20), _between(rng, 10, 60) * MIB
    begin = rng.uniform(5, 40) * MINUTE
    times = _arrivals(rng, mean, 10 * HOUR, begin)
    hours = min(8.0, (begin + 60 * GIB / (size / mean)) / HOUR)
    return _started(rng, _ramps(times, [size] * len(times), 1.0), onset=begin, hours=hours)


def by_load(rng: Random) -> Shape:
    """Grows with the number of requests, which changes."""
    mean, size, begin = _between(rng, 2, 8), _between(rng, 10, 40) * MIB, rng.uniform(5, 30) * MINUTE
    level = _serving_noise(rng, 1.0, 600)
    times = [at for at in _arrivals(rng, mean, 12 * HOUR, begin) if rng.random() < 0.2 + 0.8 * level(at)]
    hours = min(8.0, (begin + 60 * GIB / (0.6 * size / mean)) / HOUR)
    return _started(
        rng,
        _ramps(times, [size] * len(times), 1.0),
        onset=begin,
        hours=hours,
        busy=lambda at: 0.1 + 0.8 * level(at),
    )


def _paused(rng: Random, work: float, rest: float, rate: float, **fields: object) -> Shape:
    begin, slope = rng.uniform(5, 20) * MINUTE, rate * MIB / MINUTE

    def grown(at: float) -> float:
        cycles, part = divmod(max(0.0, at - begin), work + rest)
        return slope * (cycles * work + min(work, part))

    def working(at: float) -> bool:
        return at < begin or (at - begin) % (work + rest) < work

    hours = min(10.0, (begin + 60 * GIB / slope * (work + rest) / work) / HOUR)
    return _started(
        rng,
        grown,
        onset=begin,
        hours=hours,
        stepping=working,
        busy=lambda at: 0.7 if working(at) else 0.02,
        **fields,
    )


def with_pauses(rng: Random) -> Shape:
    return _paused(rng, rng.uniform(20, 50) * MINUTE, rng.uniform(10, 30) * MINUTE, _between(rng, 60, 300))


def with_nights(rng: Random) -> Shape:
    return _paused(rng, rng.uniform(60, 120) * MINUTE, 45 * MINUTE, _between(rng, 60, 200))


def with_evaluations(rng: Random) -> Shape:
    return _paused(
        rng,
        rng.uniform(10, 25) * MINUTE,
        rng.uniform(2, 5) * MINUTE,
        _between(rng, 60, 400),
        step_seconds=_steps(rng),
    )


def with_restarts(rng: Random) -> Shape:
    shape = _leak(rng, (250, 600), (0, 0.01))
    return replace(shape, lives=2, hours=min(2.0, shape.hours))


def _accelerating(rng: Random, grown: Curve, full: float, **fields: object) -> Shape:
    begin = rng.uniform(5, 40) * MINUTE
    return _started(
        rng,
        lambda at: 70 * GIB * grown(max(0.0, at - begin) / full),
        onset=begin,
        hours=(begin + full) / HOUR,
        accelerates=True,
        **fields,
    )


def quadratic(rng: Random) -> Shape:
    return _accelerating(rng, lambda share: share**2, rng.uniform(2, 7) * HOUR)


def quadratic_stepped(rng: Random) -> Shape:
    return _accelerating(rng, lambda share: share**2, rng.uniform(2, 7) * HOUR, step_seconds=_steps(rng))


def exponential(rng: Random) -> Shape:
    rate = rng.uniform(2, 4)
    return _accelerating(rng, lambda share: (exp(rate * share) - 1) / (exp(rate) - 1), rng.uniform(3, 7) * HOUR)


def power(rng: Random) -> Shape:
    exponent = rng.uniform(1.3, 2.6)
    return _accelerating(rng, lambda share: share**exponent, rng.uniform(2, 6) * HOUR)


def outside_pools(rng: Random) -> Shape:
    slope, begin = _between(rng, 60, 300) * MIB / MINUTE, rng.uniform(5, 40) * MINUTE
    return _started(
        rng,
        lambda at: 0.0,
        outside=lambda at: 600 * MIB + slope * max(0.0, at - begin),
        onset=begin,
        hours=min(8.0, (begin + 60 * GIB / slope) / HOUR),
    )


def under_teeth(rng: Random) -> Shape:
    shape = _leak(rng, (60, 300), (20, 50), sticky=False)
    length, height = rng.uniform(2, 6) * MINUTE, rng.uniform(0.5, 3) * GIB
    return replace(shape, kept=lambda at: shape.kept(at) + (height * (at % length) / length if at > 90 else 0.0))


def under_load(rng: Random) -> Shape:
    shape, noise = _leak(rng, (60, 250), (60, 120), sticky=False), _serving_noise(rng, rng.uniform(1, 4) * GIB, 300)
    return replace(shape, kept=lambda at: shape.kept(at) + (noise(at) if at > 90 else 0.0), every=5.0)


def at_random(rng: Random) -> Shape:
    mean, begin = _between(rng, 90, 400), rng.uniform(10, 40) * MINUTE
    times = _arrivals(rng, mean, 12 * HOUR, begin)
    heights = [rng.uniform(0.2, 1.0) * GIB for _ in times]
    return _started(
        rng, _ramps(times, heights), onset=begin, hours=min(8.0, (begin + 60 * GIB / (0.6 * GIB / mean)) / HOUR)
    )


def two_rates(rng: Random) -> Shape:
    shape = _leak(rng, (100, 300), (10, 40))
    change = shape.onset + rng.uniform(60, 120) * MINUTE
    factor = rng.choice((0.6, 1.8))
    return replace(
        shape,
        kept=lambda at: shape.kept(min(at, change)) + factor * (shape.kept(max(at, change)) - shape.kept(change)),
    )


LEAKS: Mapping[str, Maker] = {
    one.__name__: one
    for one in (
        by_step_from_start,
        by_step_after_rest,
        by_step_large_activations,
        by_step_growing_activations,
        slow_from_rest,
        fast_from_rest,
        from_start,
        fast_from_start,
        late,
        after_warm_up,
        by_epoch,
        by_epoch_uncounted,
        by_long_epoch,
        by_request,
        by_load,
        with_pauses,
        with_nights,
        with_evaluations,
        with_restarts,
        quadratic,
        quadratic_stepped,
        exponential,
        power,
        outside_pools,
        under_teeth,
        under_load,
        at_random,
        two_rates,
    )
}
