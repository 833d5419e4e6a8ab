"""Memory curves that are hard to judge: healthy ones that grow, and leaks that pause, jump or accelerate.

A shape is drawn from dice. Its functions take seconds since the start of the program; sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log1p, pi, sin
from random import Random

MIB, GIB = 1 << 20, 1 << 30
MINUTE, HOUR = 60.0, 3600.0
SIZE = 80 * GIB

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


def _between(dice: Random, low: float, high: float) -> float:
    return low * (high / low) ** dice.random()


def _base(dice: Random) -> float:
    return dice.uniform(8, 30) * GIB


def _loading(base: float, seconds: float, then: Curve) -> Curve:
    """Load the model for some seconds first."""
    return lambda at: base * at / seconds if at < seconds else base + then(at - seconds)


def _started(dice: Random, then: Curve, **fields: object) -> Shape:
    return Shape(kept=_loading(_base(dice), dice.uniform(15, 90), then), **fields)  # type: ignore[arg-type]


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


def _arrivals(dice: Random, mean: float, until: float, start: float = 0.0) -> list[float]:
    times, at = [], start
    while True:
        at += dice.expovariate(1 / mean)
        if at > until:
            return times
        times.append(at)


def _steps(dice: Random) -> float:
    return _between(dice, 0.3, 6)


def _serving_noise(dice: Random, high: float, mean_seconds: float = 400) -> Curve:
    """Return load that changes between levels."""
    times = _arrivals(dice, mean_seconds, 12 * HOUR)
    levels = [high * dice.betavariate(1.5, 1.5) for _ in range(len(times) + 1)]
    return lambda at: levels[bisect_right(times, at)]


# Healthy


def hyperbolic_cache(dice: Random) -> Shape:
    size, tau = dice.uniform(10, 35) * GIB, _between(dice, 15, 120) * MINUTE
    return _started(dice, lambda at: size * at / (at + tau), hours=5)


def keys_power(dice: Random) -> Shape:
    size, power = dice.uniform(8, 30) * GIB, dice.uniform(0.5, 0.68)
    return _started(dice, lambda at: size * (at / (5 * HOUR)) ** power, hours=5)


def slow_warm_up(dice: Random) -> Shape:
    size, tau = dice.uniform(5, 30) * GIB, _between(dice, 15, 70) * MINUTE
    return _started(dice, lambda at: size * (1 - exp(-at / tau)), hours=4)


def slow_warm_up_stepped(dice: Random) -> Shape:
    return replace(slow_warm_up(dice), step_seconds=_steps(dice))


def logarithm(dice: Random) -> Shape:
    size, tau = dice.uniform(2, 8) * GIB, _between(dice, 2, 20) * MINUTE
    return _started(dice, lambda at: size * log1p(at / tau), hours=5)


def saturating_keys(dice: Random) -> Shape:
    """Distinct entries of a finite catalog, requested at random."""
    count, size, mean = dice.randint(60, 400), dice.uniform(30, 120) * MIB, _between(dice, 5, 30)
    seen, times = set[int](), []
    for at in _arrivals(dice, mean, 5 * HOUR):
        key = int(count * dice.random() ** 1.5)
        if key not in seen:
            seen.add(key)
            times.append(at)
    return _started(dice, _ramps(times, [size] * len(times)), hours=5)


def cache_fills_and_stops(dice: Random) -> Shape:
    start, fill, size = dice.uniform(10, 45) * MINUTE, dice.uniform(15, 70) * MINUTE, dice.uniform(6, 30) * GIB
    return _started(dice, lambda at: size * min(1.0, max(0.0, (at - start) / fill)), hours=3.5)


def cache_fills_from_start(dice: Random) -> Shape:
    fill, size = dice.uniform(8, 40) * MINUTE, dice.uniform(6, 30) * GIB
    return _started(dice, lambda at: size * min(1.0, at / fill), hours=3)


def replay_buffer(dice: Random) -> Shape:
    fill, size = dice.uniform(30, 120) * MINUTE, dice.uniform(8, 30) * GIB
    return _started(dice, lambda at: size * min(1.0, at / fill), hours=4, step_seconds=_steps(dice))


def first_epoch_cache(dice: Random) -> Shape:
    epoch, size = dice.uniform(6, 40) * MINUTE, dice.uniform(3, 25) * GIB
    return _started(dice, lambda at: size * min(1.0, at / epoch), hours=3, step_seconds=_steps(dice))


def first_epoch_cache_uncounted(dice: Random) -> Shape:
    return replace(first_epoch_cache(dice), step_seconds=None)


def adapters(dice: Random) -> Shape:
    times = sorted(_arrivals(dice, _between(dice, 40, 200), 5 * HOUR))[: dice.randint(12, 48)]
    size = dice.uniform(80, 400) * MIB
    return _started(dice, _ramps(times, [size] * len(times)), hours=3.5)


def unfreezing(dice: Random) -> Shape:
    epoch, count = dice.uniform(5, 20) * MINUTE, dice.randint(4, 8)
    heights = [dice.uniform(0.5, 2.5) * GIB for _ in range(count)]
    times = [epoch * (i + 1) for i in range(count)]
    return _started(dice, _ramps(times, heights), hours=4, step_seconds=_steps(dice))


def _teeth(dice: Random, low: float, high: float, size: tuple[float, float] = (2, 14), **fields: object) -> Shape:
    length, height = dice.uniform(low, high) * MINUTE, dice.uniform(*size) * GIB
    return _started(dice, lambda at: height * (at % length) / length, sticky=False, **fields)


def teeth_short(dice: Random) -> Shape:
    return _teeth(dice, 3, 15, hours=2)


def teeth_stepped(dice: Random) -> Shape:
    return _teeth(dice, 5, 30, hours=2.5, step_seconds=_steps(dice))


def teeth_long(dice: Random) -> Shape:
    return _teeth(dice, 20, 40, hours=3)


def teeth_after_rest(dice: Random) -> Shape:
    rest, inner = dice.uniform(8, 20) * MINUTE, _teeth(dice, 5, 15, hours=2.5)
    return replace(inner, kept=lambda at: inner.kept(min(at, 90.0)) if at < rest else inner.kept(at - rest + 90.0))


def prefetch_queue(dice: Random) -> Shape:
    fill, size = dice.uniform(4, 14) * MINUTE, dice.uniform(2, 12) * GIB
    return _started(dice, lambda at: size * min(1.0, at / fill), hours=1.5, step_seconds=dice.choice((None, 1.0)))


def generations(dice: Random) -> Shape:
    times, at = [], 6 * MINUTE
    while at < 5 * HOUR:
        length = dice.uniform(15, 40) * MINUTE
        times.append((at, length, dice.uniform(3, 15) * GIB))
        at += length + dice.uniform(5, 15) * MINUTE

    def curve(at: float) -> float:
        i = bisect_right(times, (at, inf, inf)) - 1
        if i < 0 or at > times[i][0] + times[i][1]:
            return 0.0
        return times[i][2] * (at - times[i][0]) / times[i][1]

    return _started(dice, curve, hours=4, sticky=False)


def longer_sequences(dice: Random) -> Shape:
    high, hours = dice.uniform(8, 30) * GIB, dice.uniform(1, 4) * HOUR
    return _started(
        dice,
        lambda at: 0.0,
        hours=4,
        step_seconds=_steps(dice),
        activations=lambda at: 3 * GIB + high * min(1.0, at / hours),
    )


def larger_images(dice: Random) -> Shape:
    stage, height = dice.uniform(10, 30) * MINUTE, dice.uniform(1, 5) * GIB
    return _started(
        dice,
        lambda at: 0.0,
        hours=4,
        step_seconds=_steps(dice),
        activations=lambda at: 3 * GIB + height * min(8, at // stage),
    )


def longer_answers(dice: Random) -> Shape:
    high, power = dice.uniform(8, 25) * GIB, dice.uniform(0.7, 1.5)
    return _started(
        dice,
        lambda at: 0.0,
        hours=4,
        step_seconds=_between(dice, 5, 40),
        activations=lambda at: 2 * GIB + high * (at / (4 * HOUR)) ** power,
    )


def curriculum(dice: Random) -> Shape:
    times = sorted(dice.uniform(10, 210) * MINUTE for _ in range(3))
    return _started(dice, _ramps(times, [dice.uniform(2, 8) * GIB for _ in times]), hours=4, step_seconds=_steps(dice))


def sweep(dice: Random) -> Shape:
    """Trials of one process, each with a larger model than the one before, until the sweep starts again."""
    length, count = dice.uniform(8, 30) * MINUTE, dice.randint(4, 7)
    sizes = sorted(dice.uniform(2, 25) * GIB for _ in range(count))
    return _started(dice, lambda at: sizes[int(at // length) % count], hours=4, sticky=False, step_seconds=_steps(dice))


def rising_requests(dice: Random) -> Shape:
    """Continuous batching: the card is busy all the time, while more and more requests run."""
    rise, high = dice.uniform(1, 4) * HOUR, dice.uniform(10, 35) * GIB
    noise = _serving_noise(dice, 0.1, 120)

    def share(at: float) -> float:
        return min(1.0, 0.1 + 0.9 * at / rise) * (0.9 + noise(at))

    return _started(
        dice,
        lambda at: high * share(at),
        busy=lambda at: 0.97,
        load=lambda at: (int(200 * share(at)), min(1.0, 0.8 * share(at))),
        sticky=False,
    )


def morning(dice: Random) -> Shape:
    """Load that rises for hours, with the utilization."""
    rise, high, start = dice.uniform(1.5, 3.5) * HOUR, dice.uniform(8, 25) * GIB, dice.uniform(10, 60) * MINUTE
    noise = _serving_noise(dice, 0.25, 200)

    def share(at: float) -> float:
        return min(1.0, max(0.0, (at - start) / rise))

    return _started(
        dice,
        lambda at: high * share(at) * (0.85 + noise(at)),
        busy=lambda at: min(1.0, 0.15 + 0.7 * share(at) + 0.2 * noise(at)),
        sticky=False,
    )


def wave(dice: Random) -> Shape:
    period, high, phase = dice.uniform(3, 6) * HOUR, dice.uniform(3, 12) * GIB, dice.random()
    noise = _serving_noise(dice, 2 * GIB)
    return _started(
        dice,
        lambda at: high * (1 + sin(2 * pi * (at / period + phase))) / 2 + noise(at),
        busy=lambda at: 0.3 + 0.5 * (1 + sin(2 * pi * (at / period + phase))) / 2,
        hours=8,
        every=5.0,
        sticky=False,
    )


def model_load(dice: Random) -> Shape:
    at_, height = dice.uniform(40, 150) * MINUTE, dice.uniform(0.06, 0.2) * SIZE
    noise = _serving_noise(dice, dice.uniform(1, 4) * GIB)
    return _started(
        dice, lambda at: noise(at) + height * min(1.0, max(0.0, (at - at_) / 40)), hours=5, every=5.0, sticky=False
    )


def model_loads(dice: Random) -> Shape:
    times = sorted(dice.uniform(30, 200) * MINUTE for _ in range(2))
    noise = _serving_noise(dice, dice.uniform(1, 4) * GIB)
    rises = _ramps(times, [dice.uniform(2, 10) * GIB for _ in times], 40)
    return _started(dice, lambda at: noise(at) + rises(at), hours=5, every=5.0, sticky=False)


def model_load_quiet(dice: Random) -> Shape:
    times = [dice.uniform(20, 100) * MINUTE]
    return _started(dice, _ramps(times, [dice.uniform(2, 15) * GIB], dice.uniform(20, 300)), hours=2.5)


def steady_training(dice: Random) -> Shape:
    act = dice.uniform(2, 20) * GIB
    return _started(dice, lambda at: 0.0, activations=lambda at: act, step_seconds=_steps(dice), hours=2)


def checkpoints(dice: Random) -> Shape:
    every, height = dice.uniform(8, 40) * MINUTE, dice.uniform(1, 10) * GIB
    return _started(
        dice, lambda at: height if at % every > every - 50 else 0.0, hours=3, step_seconds=_steps(dice), sticky=False
    )


def evaluations(dice: Random) -> Shape:
    every, length = dice.uniform(15, 40) * MINUTE, dice.uniform(3, 10) * MINUTE
    height = dice.uniform(4, 18) * GIB

    def curve(at: float) -> float:
        return height * max(0.0, (at % every) - (every - length)) / length

    return _started(
        dice, curve, hours=3, step_seconds=_steps(dice), stepping=lambda at: at % every < every - length, sticky=False
    )


def evaluations_uncounted(dice: Random) -> Shape:
    return replace(evaluations(dice), step_seconds=None)


def notebook(dice: Random) -> Shape:
    level, times, levels = 1 * GIB, _arrivals(dice, 240, 4 * HOUR), [1.0 * GIB]
    for _ in times:
        level = min(45 * GIB, max(0.5 * GIB, level + dice.gauss(0.4, 3) * GIB))
        levels.append(level)
    return Shape(kept=lambda at: levels[bisect_right(times, at)], busy=lambda at: 0.2, hours=4, sticky=False)


def arena_records(dice: Random) -> Shape:
    """The arena keeps the largest request so far."""
    times, high, rises, heights = _arrivals(dice, 20, 5 * HOUR), 0.0, [], []
    for at in times:
        need = dice.lognormvariate(0, 0.8) * GIB
        if need > high:
            rises.append(at)
            heights.append(need - high)
            high = need
    return _started(dice, _ramps(rises, heights), hours=5)


def restarts(dice: Random) -> Shape:
    size, tau = dice.uniform(5, 20) * GIB, dice.uniform(1, 4) * MINUTE
    return _started(dice, lambda at: size * (1 - exp(-at / tau)), hours=0.5, lives=6)


def compiled_shapes(dice: Random) -> Shape:
    """Outside the pools: one graph for each new shape, of which there is a finite number."""
    count, size, seen, times = dice.randint(20, 80), dice.uniform(40, 150) * MIB, set[int](), []
    for at in _arrivals(dice, _between(dice, 10, 40), 4 * HOUR):
        key = int(count * dice.random() ** 2)
        if key not in seen:
            seen.add(key)
            times.append(at)
    graphs = _ramps(times, [size] * len(times))
    return _started(dice, lambda at: 0.0, outside=lambda at: 600 * MIB + graphs(at), hours=4)


def index_build(dice: Random) -> Shape:
    start, fill, size = dice.uniform(0, 15) * MINUTE, dice.uniform(35, 90) * MINUTE, dice.uniform(8, 30) * GIB
    return _started(dice, lambda at: size * min(1.0, max(0.0, (at - start) / fill)), hours=3)


def lazy_optimizer(dice: Random) -> Shape:
    tau, size = dice.uniform(1, 5) * MINUTE, dice.uniform(4, 20) * GIB
    return _started(dice, lambda at: size * min(1.0, at / tau), hours=1.5, step_seconds=_steps(dice))


def expiring_cache(dice: Random) -> Shape:
    """Entries expire after a time: grows in a line until then."""
    expiry, size = dice.uniform(10, 40) * MINUTE, dice.uniform(3, 20) * GIB
    noise = _serving_noise(dice, 0.1, 120)
    return _started(dice, lambda at: size * min(1.0, at / expiry) * (0.95 + noise(at)), hours=3, sticky=False)


def sleeping_engine(dice: Random) -> Shape:
    awake, asleep, size = dice.uniform(10, 40) * MINUTE, dice.uniform(5, 20) * MINUTE, dice.uniform(20, 60) * GIB
    return Shape(
        kept=lambda at: size if at % (awake + asleep) < awake else 1.2 * GIB,
        busy=lambda at: 0.6 if at % (awake + asleep) < awake else 0.0,
        hours=3,
        sticky=False,
    )


def bimodal_serving(dice: Random) -> Shape:
    noise = _serving_noise(dice, dice.uniform(4, 14) * GIB, dice.uniform(100, 900))
    return _started(dice, noise, hours=6, every=5.0, sticky=False)


def slowing_stairs(dice: Random) -> Shape:
    """Each shard of a table is loaded when it is first asked for, and later ones are asked for less often."""
    times, at, pause = [], 3 * MINUTE, dice.uniform(2, 5) * MINUTE
    while at < 5 * HOUR:
        times.append(at)
        at += pause
        pause *= dice.uniform(1.1, 1.3)
    return _started(dice, _ramps(times, [dice.uniform(0.5, 2) * GIB] * len(times)), hours=5)


def growing_context(dice: Random) -> Shape:
    """One conversation whose KV cache grows until it is cut."""
    length, height = dice.uniform(10, 35) * MINUTE, dice.uniform(2, 10) * GIB

    def curve(at: float) -> float:
        return height * min(1.0, at / length) if at < 1.5 * HOUR else height * min(1.0, (at - 1.5 * HOUR) / length)

    return _started(dice, curve, hours=3, sticky=False)


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


def _leak(dice: Random, rate: tuple[float, float], onset: tuple[float, float], **fields: object) -> Shape:
    """Grow in a line, by MiB a minute, from a minute between ``onset`` on."""
    slope, begin = _between(dice, *rate) * MIB / MINUTE, dice.uniform(*onset) * MINUTE
    hours = min(8.0, (begin + 60 * GIB / slope) / HOUR)
    return _started(dice, lambda at: slope * max(0.0, at - begin), onset=begin, hours=hours, **fields)


def by_step_from_start(dice: Random) -> Shape:
    return _leak(dice, (60, 500), (0, 0.01), step_seconds=_steps(dice))


def by_step_after_rest(dice: Random) -> Shape:
    return _leak(dice, (60, 600), (10, 60), step_seconds=_steps(dice))


def by_step_large_activations(dice: Random) -> Shape:
    act = dice.uniform(8, 25) * GIB
    return _leak(dice, (60, 400), (0, 30), step_seconds=_steps(dice), activations=lambda at: act)


def by_step_growing_activations(dice: Random) -> Shape:
    shape = _leak(dice, (60, 300), (10, 40), step_seconds=_steps(dice))
    return replace(shape, activations=lambda at: 2 * GIB + 6 * GIB * min(1.0, at / HOUR))


def slow_from_rest(dice: Random) -> Shape:
    return _leak(dice, (20, 60), (20, 60))


def fast_from_rest(dice: Random) -> Shape:
    return _leak(dice, (250, 1000), (12, 40))


def from_start(dice: Random) -> Shape:
    return _leak(dice, (60, 300), (0, 0.01))


def fast_from_start(dice: Random) -> Shape:
    return _leak(dice, (300, 900), (0, 0.01))


def late(dice: Random) -> Shape:
    return _leak(dice, (60, 400), (110, 200))


def after_warm_up(dice: Random) -> Shape:
    size, tau = dice.uniform(2, 10) * GIB, dice.uniform(1, 6) * MINUTE
    shape = _leak(dice, (60, 300), (25, 45))
    return replace(shape, kept=lambda at: shape.kept(at) + size * (1 - exp(-at / tau)))


def _stairs(dice: Random, pause: tuple[float, float], height: tuple[float, float], **fields: object) -> Shape:
    every, size = dice.uniform(*pause) * MINUTE, _between(dice, *height) * MIB
    rate, begin = size / every, dice.uniform(2, 20) * MINUTE
    hours = min(10.0, (begin + 60 * GIB / rate) / HOUR)
    return _started(
        dice,
        lambda at: size * max(0, (at - begin) // every + 1) if at > begin else 0.0,
        onset=begin,
        hours=hours,
        **fields,
    )


def by_epoch(dice: Random) -> Shape:
    return _stairs(dice, (3, 10), (200, 900), step_seconds=_steps(dice))


def by_epoch_uncounted(dice: Random) -> Shape:
    return _stairs(dice, (3, 12), (300, 1500))


def by_long_epoch(dice: Random) -> Shape:
    return _stairs(dice, (15, 40), (4500, 9000), step_seconds=_steps(dice))


def by_request(dice: Random) -> Shape:
    mean, size = _between(dice, 2, 20), _between(dice, 10, 60) * MIB
    begin = dice.uniform(5, 40) * MINUTE
    times = _arrivals(dice, mean, 10 * HOUR, begin)
    hours = min(8.0, (begin + 60 * GIB / (size / mean)) / HOUR)
    return _started(dice, _ramps(times, [size] * len(times), 1.0), onset=begin, hours=hours)


def by_load(dice: Random) -> Shape:
    """Grows with the number of requests, which changes."""
    mean, size, begin = _between(dice, 2, 8), _between(dice, 10, 40) * MIB, dice.uniform(5, 30) * MINUTE
    level = _serving_noise(dice, 1.0, 600)
    times = [at for at in _arrivals(dice, mean, 12 * HOUR, begin) if dice.random() < 0.2 + 0.8 * level(at)]
    hours = min(8.0, (begin + 60 * GIB / (0.6 * size / mean)) / HOUR)
    return _started(
        dice,
        _ramps(times, [size] * len(times), 1.0),
        onset=begin,
        hours=hours,
        busy=lambda at: 0.1 + 0.8 * level(at),
    )


def _paused(dice: Random, work: float, rest: float, rate: float, **fields: object) -> Shape:
    begin, slope = dice.uniform(5, 20) * MINUTE, rate * MIB / MINUTE

    def grown(at: float) -> float:
        cycles, part = divmod(max(0.0, at - begin), work + rest)
        return slope * (cycles * work + min(work, part))

    def working(at: float) -> bool:
        return at < begin or (at - begin) % (work + rest) < work

    hours = min(10.0, (begin + 60 * GIB / slope * (work + rest) / work) / HOUR)
    return _started(
        dice,
        grown,
        onset=begin,
        hours=hours,
        stepping=working,
        busy=lambda at: 0.7 if working(at) else 0.02,
        **fields,
    )


def with_pauses(dice: Random) -> Shape:
    return _paused(dice, dice.uniform(20, 50) * MINUTE, dice.uniform(10, 30) * MINUTE, _between(dice, 60, 300))


def with_nights(dice: Random) -> Shape:
    return _paused(dice, dice.uniform(60, 120) * MINUTE, 45 * MINUTE, _between(dice, 60, 200))


def with_evaluations(dice: Random) -> Shape:
    return _paused(
        dice,
        dice.uniform(10, 25) * MINUTE,
        dice.uniform(2, 5) * MINUTE,
        _between(dice, 60, 400),
        step_seconds=_steps(dice),
    )


def with_restarts(dice: Random) -> Shape:
    shape = _leak(dice, (250, 600), (0, 0.01))
    return replace(shape, lives=2, hours=min(2.0, shape.hours))


def _accelerating(dice: Random, grown: Curve, full: float, **fields: object) -> Shape:
    begin = dice.uniform(5, 40) * MINUTE
    return _started(
        dice,
        lambda at: 70 * GIB * grown(max(0.0, at - begin) / full),
        onset=begin,
        hours=(begin + full) / HOUR,
        accelerates=True,
        **fields,
    )


def quadratic(dice: Random) -> Shape:
    return _accelerating(dice, lambda share: share**2, dice.uniform(2, 7) * HOUR)


def quadratic_stepped(dice: Random) -> Shape:
    return _accelerating(dice, lambda share: share**2, dice.uniform(2, 7) * HOUR, step_seconds=_steps(dice))


def exponential(dice: Random) -> Shape:
    rate = dice.uniform(2, 4)
    return _accelerating(dice, lambda share: (exp(rate * share) - 1) / (exp(rate) - 1), dice.uniform(3, 7) * HOUR)


def power(dice: Random) -> Shape:
    exponent = dice.uniform(1.3, 2.6)
    return _accelerating(dice, lambda share: share**exponent, dice.uniform(2, 6) * HOUR)


def outside_pools(dice: Random) -> Shape:
    slope, begin = _between(dice, 60, 300) * MIB / MINUTE, dice.uniform(5, 40) * MINUTE
    return _started(
        dice,
        lambda at: 0.0,
        outside=lambda at: 600 * MIB + slope * max(0.0, at - begin),
        onset=begin,
        hours=min(8.0, (begin + 60 * GIB / slope) / HOUR),
    )


def under_teeth(dice: Random) -> Shape:
    shape = _leak(dice, (60, 300), (20, 50), sticky=False)
    length, height = dice.uniform(2, 6) * MINUTE, dice.uniform(0.5, 3) * GIB
    return replace(shape, kept=lambda at: shape.kept(at) + (height * (at % length) / length if at > 90 else 0.0))


def under_load(dice: Random) -> Shape:
    shape, noise = _leak(dice, (60, 250), (60, 120), sticky=False), _serving_noise(dice, dice.uniform(1, 4) * GIB, 300)
    return replace(shape, kept=lambda at: shape.kept(at) + (noise(at) if at > 90 else 0.0), every=5.0)


def at_random(dice: Random) -> Shape:
    mean, begin = _between(dice, 90, 400), dice.uniform(10, 40) * MINUTE
    times = _arrivals(dice, mean, 12 * HOUR, begin)
    heights = [dice.uniform(0.2, 1.0) * GIB for _ in times]
    return _started(
        dice, _ramps(times, heights), onset=begin, hours=min(8.0, (begin + 60 * GIB / (0.6 * GIB / mean)) / HOUR)
    )


def two_rates(dice: Random) -> Shape:
    shape = _leak(dice, (100, 300), (10, 40))
    change = shape.onset + dice.uniform(60, 120) * MINUTE
    factor = dice.choice((0.6, 1.8))
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
