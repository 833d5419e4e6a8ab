"""Ordinary program behaviour below the pattern of a scenario: warm-up, work, and noise. Pure."""

from __future__ import annotations

import math
from random import Random

from gpumond.facts.units import GIB, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.script import LevelStep, Script, every

QUIET_BYTES = 32 * MIB
NOISY_BYTES = 307 * MIB
"""0.3 GiB: standard deviation from sample to sample."""

NOISY_LIMIT = 100 * MIB
"""A series with less noise is called quiet."""

WANDER_BYTES = 512 * MIB
WANDER_SECONDS = 10 * MINUTE_SECONDS
"""Slow random changes of a noisy program's load: standard deviation, and correlation time."""


def noise(script: Script) -> float:
    """Draw quiet or noisy, with equal probability."""
    drawn = QUIET_BYTES if script.dice.random() < 0.5 else NOISY_BYTES
    return script.number("noise", drawn)


def host(script: Script, share: tuple[float, float] = (0.15, 0.4), noise_bytes: float | None = None) -> float:
    """Start program 0, which works to the end of the plan. Returns the end of its warm-up.

    ``share``: bounds of its permanent memory, as parts of the device.
    """
    noise_bytes = noise(script) if noise_bytes is None else noise_bytes
    program = script.program("load")
    lasting = script.dice.uniform(*share) * script.size_bytes
    ready = script.fill(1.0, lasting, script.dice.uniform(20.0, 120.0))
    work(script, ready, script.duration, program, noise_bytes)
    return ready


def work(script: Script, start: float, end: float, program: int, noise_bytes: float) -> None:
    """A working set around 2 GiB and a utilisation, both with noise.

    Half of the noisy programs release freed memory to the device, so that the driver's reading decreases, too.
    """
    dice, pulse = (script.random(f"{what} of {program} at {start:.3f}") for what in ("memory", "utilisation"))
    noisy = noise_bytes >= NOISY_LIMIT
    returning, utilisation = noisy and pulse.random() < 0.5, pulse.uniform(0.5, 0.9)
    level = LevelStep(script, 128 * MIB if noisy else 16 * MIB, program)
    wander = Wander(dice, WANDER_BYTES if noisy else 0.0, WANDER_SECONDS)
    period = 1.0 if noisy else 5.0
    for at in every(start, end, period):
        level.to(at, 2 * GIB + wander.after(period) + dice.gauss(0.0, noise_bytes))
    for at in every(start, end, 10.0):
        script.busy(at, utilisation + pulse.uniform(-0.08, 0.08), program)
        if returning:
            script.flush(at, program)


class Wander:
    """An Ornstein-Uhlenbeck process with mean 0."""

    def __init__(self, dice: Random, deviation: float, seconds: float) -> None:
        self._dice, self._deviation, self._seconds = dice, deviation, seconds
        self._value = dice.gauss(0.0, deviation)

    def after(self, seconds: float) -> float:
        kept = math.exp(-seconds / self._seconds)
        self._value = kept * self._value + math.sqrt(1 - kept * kept) * self._dice.gauss(0.0, self._deviation)
        return self._value
