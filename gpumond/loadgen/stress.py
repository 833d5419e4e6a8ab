"""Loads to test devices and gpumond itself: steady, stress, flush-storm. Pure."""

from __future__ import annotations

from gpumond.loadgen.host_program import QUIET_BYTES, host, noise
from gpumond.loadgen.script import CONTEXT_BYTES, HOUR, LevelStep, Script, Truth, every
from gpumond.model.units import GIB, MIB

NEARLY_ALL = 0.95
"""Used share above which a device is under pressure."""


def steady(script: Script) -> None:
    script.last(2 * HOUR)
    host(script, (0.2, 0.8), noise(script))


def stress(script: Script) -> None:
    """Fill the device and hold the memory. Engines whose memory has contents write and verify a pattern."""
    fill = script.number("fill", 0.9) if script.inject else 0.5
    end = script.last(HOUR)
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    size, block = fill * script.size_bytes, GIB
    for number in range(int(size // block)):
        at = 1.0 + 0.25 * number
        script.take(at, block, program)
        if not script.truth.kind and (number + 1) * block + CONTEXT_BYTES > NEARLY_ALL * script.size_bytes:
            script.truth = Truth("pressure", injected_at=at, ends_at=end)
    for at in every(1.0, script.duration, 10.0):
        script.busy(at, 1.0, program)


def flush_storm(script: Script) -> None:
    """Allocate and free continuously, with repeated flushes."""
    period = script.number("period", 2.0)
    script.last(HOUR)
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    script.fill(1.0, 0.2 * script.size_bytes, 10.0)
    level = LevelStep(script, 512 * MIB, program)
    for at in every(12.0, script.duration, 1.0):
        level.to(at, script.dice.uniform(0.0, 0.3) * script.size_bytes)
        script.busy(at, script.dice.uniform(0.3, 0.9), program)
    for at in every(12.5, script.duration, period):
        script.flush(at, program)
