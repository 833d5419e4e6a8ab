"""Scenarios of healthy programs: N1 to N7, and steady use. No I/O."""

from __future__ import annotations

import math

from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.host_program import QUIET_BYTES, WANDER_SECONDS, Wander, host, noise, work
from gpumond.features.loadgen.script import LevelStep, Script, every


def warm_up(script: Script) -> None:
    slowness = script.number("time", math.exp(script.dice.uniform(math.log(1.0), math.log(20.0))) * MINUTE_SECONDS)
    plateau = script.number("share", script.dice.uniform(0.3, 0.85)) * script.size_bytes
    end = script.last(4 * HOUR_SECONDS)
    host(script, (0.02, 0.08), noise(script))
    level = LevelStep(script, 64 * MIB)
    for at in every(5.0, min(end, 9 * slowness), 5.0):
        level.to(at, (plateau - 0.1 * script.size_bytes) * (1 - math.exp(-at / slowness)))


def autotune(script: Script) -> None:
    """Trials of algorithms allocate large workspaces, then release them to the device, too."""
    peak = script.number("share", script.dice.uniform(0.5, 0.9)) * script.size_bytes
    kept = peak * script.dice.uniform(0.15, 0.4)
    script.last(3 * HOUR_SECONDS)
    program = script.program("load")
    ready = script.fill(1.0, kept, 15.0)
    trials, over = LevelStep(script, 256 * MIB), ready + script.dice.uniform(1.0, 3.0) * MINUTE_SECONDS
    for at in every(ready, over, 4.0):
        trials.to(at, (peak - kept) * script.dice.uniform(0.3, 1.0))
    trials.to(over, 0)
    script.flush(over + 1.0)
    work(script, over + 2.0, script.duration, program, noise(script))


def preallocated(script: Script) -> None:
    share = script.number("share", script.dice.uniform(0.6, 0.94))
    script.last(6 * HOUR_SECONDS)
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    script.fill(5.0, 0.1 * script.size_bytes, 15.0)
    script.allocate(25.0, (share - 0.1) * script.size_bytes - GIB)
    load = Wander(script.random("load"), 0.25, WANDER_SECONDS)
    for at in every(30.0, script.duration, 10.0):
        script.busy(at, 0.4 + load.after(10.0), program)


def saturating_cache(script: Script) -> None:
    """A cache grows with every request larger than all previous ones; these become rare."""
    time = script.number("time", script.dice.uniform(2.0, 6.0) * HOUR_SECONDS)
    rate = script.number("requests", script.dice.uniform(0.1, 1.0))
    full = script.number("share", script.dice.uniform(0.3, 0.6)) * script.size_bytes
    end = script.last(9 * HOUR_SECONDS)
    ready = host(script, (0.1, 0.25))
    usual = 0.95 * full / max(1.0, math.log(rate * time))  # so that the cache reaches 95 % of its size after that time
    requests = script.random("requests")
    arena, largest, at = LevelStep(script, 32 * MIB), 0.0, ready
    while at < end:
        size = min(full, requests.expovariate(1 / usual))
        if size > largest:
            largest = size
            arena.to(at, largest)
        at += requests.expovariate(rate)


def periodic_evaluation(script: Script) -> None:
    period = script.number("period", script.dice.uniform(5.0, 60.0) * MINUTE_SECONDS)
    script.last(max(4 * HOUR_SECONDS, 8 * period))
    seconds = min(0.6 * period, script.dice.uniform(1.0, 10.0) * MINUTE_SECONDS)
    size = script.number("step", script.dice.uniform(5, 20) * GIB)
    ready = host(script, (0.15, 0.4), noise(script))
    ramp = LevelStep(script, 256 * MIB)
    for at in every(ready + script.dice.uniform(0.2, 1.0) * period, script.duration - seconds - 2.0, period):
        for part in range(20):
            ramp.to(at + seconds * part / 20, size * (part + 1) / 20)
        ramp.to(at + seconds, 0)
        script.flush(at + seconds + 1.0)


def curriculum(script: Script) -> None:
    """The batch size grows permanently, in steps that are hours apart."""
    steps = int(script.number("times", script.dice.choice((1, 2, 3))))
    script.last(9 * HOUR_SECONDS)
    at = host(script, (0.1, 0.2), noise(script)) + script.dice.uniform(0.5, 2.0) * HOUR_SECONDS
    for _ in range(steps):
        script.fill(at, script.number("step", 0) or script.dice.uniform(2, min(20, 48 / steps)) * GIB, 5.0)
        at += script.dice.uniform(1.5, 3.5) * HOUR_SECONDS


def fleet(script: Script) -> None:
    """Programs, each on its own device, share one load: a daily cycle, and changes of 1.5 GiB per minute."""
    programs = int(script.number("programs", 4))
    end = script.last(24 * HOUR_SECONDS)
    script.number("noise", 64 * MIB)
    swing = script.number("step", 4 * GIB)
    noon = script.dice.uniform(0, 24) * HOUR_SECONDS
    shared = script.random("shared load")
    load = Wander(shared, 0.5 * GIB, 20 * MINUTE_SECONDS)
    jump, jump_ends, course = 0.0, 0.0, []
    for at in every(60.0, end, 30.0):
        if at > jump_ends and shared.random() < 30.0 / HOUR_SECONDS:
            jump, jump_ends = shared.uniform(0.75, 3.0) * GIB, at + shared.uniform(2, 20) * MINUTE_SECONDS
        rising = jump if at <= jump_ends else 0.0
        course.append(
            (at, swing * math.cos(2 * math.pi * (at - noon) / (24 * HOUR_SECONDS)) + load.after(30.0) + rising)
        )
    for device in range(programs):
        own = script.random(f"program {device}")
        program = script.program(f"load-{device}", device=device)
        lasting = own.uniform(0.2, 0.6) * script.size_bytes
        script.fill(1.0, lasting, 50.0, program)
        level, gain, about = LevelStep(script, 64 * MIB, program), own.uniform(0.7, 1.3), 0.0
        for at, value in course:
            about += (value - about) * min(1.0, 1.5 * GIB / 2 / max(1.0, abs(value - about)))  # 1.5 GiB a minute
            level.to(at, 6 * GIB + gain * about + own.gauss(0.0, 0.1 * GIB))
            script.flush(at + 1.0, program)  # the driver's reading decreases, too
            script.busy(at, 0.5 + about / (16 * GIB), program)


def steady(script: Script) -> None:
    script.last(2 * HOUR_SECONDS)
    host(script, (0.2, 0.8), noise(script))
