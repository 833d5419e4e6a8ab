"""Scenarios that leak: P1 to P5 and P9. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.host_program import NOISY_LIMIT, host, noise
from gpumond.features.loadgen.script import LevelStep, Script, Truth, every

MAX_RATE = 512 * MIB / MINUTE_SECONDS
"""Maximum rate: faster growth fills the device before a diagnosis is possible."""
ALIGNMENT = 2 * MIB
"""Size of a segment; blocks of a multiple of it leave no hole."""

PIECE = 512 * MIB
"""Size of the blocks that an evaluation allocates."""


def linear(script: Script) -> None:
    rate = script.number("rate", script.dice.choice((2, 8, 32, 128, 512)) * MIB) / MINUTE_SECONDS
    noise_bytes = noise(script)
    slow = noise_bytes >= NOISY_LIMIT or rate < 30 * MIB / MINUTE_SECONDS
    script.last(6 * HOUR_SECONDS if slow else 3 * HOUR_SECONDS)
    onset = _onset(script, host(script, noise_bytes=noise_bytes))
    steadily(script, onset, rate)


def per_epoch(script: Script) -> None:
    kept = script.number("step", script.dice.choice((4, 100, 254)) * MIB)
    period = script.number("period", script.dice.choice((1, 5, 20)) * MINUTE_SECONDS)
    end = script.last(9 * HOUR_SECONDS if period > 10 * MINUTE_SECONDS else 5 * HOUR_SECONDS)
    ready = host(script, (0.15, 0.3))
    ramp = LevelStep(script, 256 * MIB)
    for epoch in every(ready, end, period):
        for part in range(32):  # the sawtooth within an epoch
            at = epoch + 0.95 * period * part / 32
            if at < end:
                ramp.to(at, 16 * GIB * (part + 1) / 32)
        if epoch + 0.97 * period < end:
            ramp.to(epoch + 0.97 * period, 0)
    first = ready + period * (0.99 + int(script.dice.uniform(5 * MINUTE_SECONDS, 40 * MINUTE_SECONDS) / period))
    _leak(script, "stairs", first, kept / period, [(at, kept) for at in every(first, end, period)])


def under_load(script: Script) -> None:
    """Every request leaks a small block. Busy and idle periods alternate; there is no growth in idle periods."""
    kept = script.number("step", script.dice.choice((5, 50, 150)) * MIB)
    fastest = min(1.0, MAX_RATE / kept)
    rate = script.number("requests", math.exp(script.dice.uniform(math.log(0.02), math.log(fastest))))
    end = script.last(6 * HOUR_SECONDS)
    ready = host(script)
    onset = _onset(script, ready)
    requests = script.random("requests")
    phases = script.random("phases")
    kept_at, at = [], ready
    while at < end:
        idle_at = min(end, at + phases.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS))
        at += requests.expovariate(rate)
        while at < idle_at:
            if at >= onset:
                kept_at.append((at, kept))
            at += requests.expovariate(rate)
        until = min(end, idle_at + phases.uniform(5 * MINUTE_SECONDS, 20 * MINUTE_SECONDS))
        script.steps = [step for step in script.steps if step.action != "busy" or not idle_at <= step.at < until]
        script.busy(idle_at, 0.0)
        at = until
    _leak(script, "load-proportional", onset, None, kept_at)


def irregular(script: Script) -> None:
    period = script.number("period", 20 * MINUTE_SECONDS)
    end = script.last(9 * HOUR_SECONDS)
    onset = _onset(script, host(script))
    jumps = script.random("jumps")
    kept, at = [], onset
    while at < end:
        kept.append((at, jumps.uniform(0.2, 2.0) * GIB))
        at += jumps.expovariate(1 / period)
    _leak(script, "stairs", onset, None, kept)


def compile_cache(script: Script) -> None:
    """Every new shape keeps its executable, in the framework's pool or outside it."""
    period = script.number("period", script.dice.uniform(1.0, 5.0) * MINUTE_SECONDS)
    outside = script.word("where", script.dice.choice(("outside", "pool"))) == "outside"
    end = script.last(8 * HOUR_SECONDS)
    onset = _onset(script, host(script))
    shapes = script.random("shapes")
    kept, at = [], onset
    while at < end:
        kept.append((at, shapes.uniform(20, 200) * MIB))
        at += shapes.uniform(0.7, 1.3) * period
    _leak(script, "linear", onset, None, kept, outside)


def at_evaluation(script: Script) -> None:
    """An evaluation allocates 20 to 28 GiB and frees half of it."""
    period = script.number("period", script.dice.uniform(20.0, 40.0) * MINUTE_SECONDS)
    end = script.last(5 * HOUR_SECONDS)
    ready = host(script, (0.12, 0.2))
    first = ready + script.dice.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS)
    sizes = script.random("evaluations")
    ramp, kept = LevelStep(script, PIECE), []
    for at in every(first, end, period):
        pieces = round(sizes.uniform(20, 28) * GIB / (2 * PIECE))
        for piece in range(pieces):
            moment = at + 60.0 * piece / pieces
            ramp.to(moment, (piece + 1) * PIECE)
            kept.append((moment, PIECE))
        ramp.to(at + 90.0, 0)
    _leak(script, "stairs", first, None, kept, given_back_after=90.0)


def steadily(script: Script, onset: float, rate: float) -> None:
    """Leak tensors at a constant rate, in bytes per second."""
    tensor = math.ceil(min(16 * MIB, max(2 * rate, min(4 * MIB, 60 * rate))) / ALIGNMENT) * ALIGNMENT
    pause = tensor / rate
    _leak(script, "linear", onset, rate, [(at, tensor) for at in every(onset + pause, script.duration, pause)])


def _onset(script: Script, ready: float) -> float:
    return ready + script.dice.uniform(10 * MINUTE_SECONDS, 40 * MINUTE_SECONDS)


def _leak(
    script: Script,
    form: str,
    onset: float,
    rate: float | None,
    kept: Sequence[tuple[float, float]],
    outside: bool = False,
    given_back_after: float | None = None,
) -> None:
    """Leak blocks of the sizes at the times, and set the truth. ``rate``: mean rate, computed from the blocks if None.

    ``given_back_after``: seconds after which the blocks are freed without the injection.
    """
    if not script.inject and given_back_after is None:
        return
    kept = [(at, size) for at, size in kept if at < script.duration]
    for at, size in kept:
        block = script.allocate(at, size, outside=outside)
        if not script.inject and given_back_after is not None:
            script.free(at + given_back_after, block)
    if script.inject and kept:
        script.kept = kept
        script.truth = Truth("leak", form, injected_at=onset, slope_bytes_per_second=rate)
