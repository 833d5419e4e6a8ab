"""The ordinary program that carries what a scenario is about: it warms up, works, and is quiet or noisy. Pure."""

from __future__ import annotations

import math
from random import Random

from gpumond.loadgen.script import GIB, MIB, MINUTE, LevelStep, Script, every

QUIET_BYTES = 32 * MIB
NOISY_BYTES = 307 * MIB
"""0.3 GiB: standard deviation from sample to sample."""

NOISY_LIMIT = 100 * MIB
"""A series with less noise is called quiet."""

WANDER_BYTES = 512 * MIB
WANDER_SECONDS = 10 * MINUTE
"""A noisy program's load also wanders: standard deviation, and the time in which it forgets."""


def noise(script: Script) -> float:
    """Quiet or noisy, half of the seeds each."""
    drawn = QUIET_BYTES if script.dice.random() < 0.5 else NOISY_BYTES
    return script.number("noise", drawn)


def host(script: Script, share: tuple[float, float] = (0.15, 0.4), noise_bytes: float | None = None) -> float:
    """Starts program 0 and lets it work to the end of the plan; returns when it has warmed up.

    ``share``: its lasting memory is drawn between these parts of the card.
    """
    noise_bytes = noise(script) if noise_bytes is None else noise_bytes
    program = script.program("load")
    lasting = script.dice.uniform(*share) * script.size_bytes
    ready = script.fill(1.0, lasting, script.dice.uniform(20.0, 120.0))
    work(script, ready, script.duration, program, noise_bytes)
    return ready


def work(script: Script, start: float, end: float, program: int, noise_bytes: float) -> None:
    """A working set around 2 GiB and a utilisation, both with noise.

    Half of the noisy programs return what they free, so that the driver sees them fall, too.
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
    """A value that wanders about 0 and forgets where it was (an Ornstein-Uhlenbeck process)."""

    def __init__(self, dice: Random, deviation: float, seconds: float) -> None:
        self._dice, self._deviation, self._seconds = dice, deviation, seconds
        self._value = dice.gauss(0.0, deviation)

    def after(self, seconds: float) -> float:
        kept = math.exp(-seconds / self._seconds)
        self._value = kept * self._value + math.sqrt(1 - kept * kept) * self._dice.gauss(0.0, self._deviation)
        return self._value
