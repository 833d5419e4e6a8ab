"""Fragmentation, orphans and crashes (P6 to P8), and loads on devices and on gpumond itself. No I/O."""

from __future__ import annotations

from collections import deque
from typing import cast

from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.host_program import QUIET_BYTES, host, work
from gpumond.features.loadgen.script import CONTEXT_BYTES, Ending, LevelStep, Script, Truth, every

ORPHANS = ("unlisted", "gone", "holder")
NEARLY_ALL = 0.95
"""Used share above which a device is under pressure."""


def fragmentation(script: Script) -> None:
    """Blocks are allocated in pairs. One of each pair is freed, and its successor is larger than the hole.

    The peak of live memory in every step is constant. Without the injection the successors fit the holes.
    """
    end = script.last(6 * HOUR_SECONDS)
    share = script.number("share", script.dice.uniform(0.42, 0.5))
    spread = script.number("over", script.dice.uniform(1.5, 2.5) * HOUR_SECONDS)
    size = int(script.dice.uniform(48, 96)) // 2 * 2 * MIB
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    step = script.dice.uniform(15.0, 40.0)
    pairs: deque[tuple[int, int, int]] = deque()  # size and blocks
    for number in range(int(share * script.size_bytes / (2 * size))):
        pairs.append(pair(script, 1.0 + 0.2 * number, size))
    ready = 10.0 + 0.2 * len(pairs)
    activations = LevelStep(script, 512 * MIB, program)
    peaks = list(every(ready, end, step))
    for at in peaks:
        for part in range(6):
            activations.to(at + step * part / 20, 4 * GIB * (part + 1) / 6)
        activations.to(at + 0.9 * step, 0)
        script.busy(at, script.dice.uniform(0.7, 0.9), program)
    onset = ready + script.dice.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS)
    during = [at + 0.5 * step for at in peaks if onset <= at < onset + spread]
    freed_pairs = len(pairs) * 1.4  # all of the first generation, and a part of the second
    freed, done = 0, 0
    for number, at in enumerate(during, 1):
        while done < freed_pairs * number / len(during):
            size, doomed, _ = pairs.popleft()
            script.free(at, doomed)
            freed, done = freed + size, done + 1
            larger = int(1.25 * size) // (2 * MIB) * 2 * MIB if script.inject else size
            if freed >= 2 * larger:
                pairs.append(pair(script, at, larger))
                freed -= 2 * larger
    if script.inject:
        script.truth = Truth("fragmentation", injected_at=onset, ends_at=end)


def pair(script: Script, at: float, size: int) -> tuple[int, int, int]:
    """Allocate two neighbours of one segment. Returns their size and both blocks."""
    script.free(at, script.allocate(at, 2 * size))
    return size, script.allocate(at, size), script.allocate(at, size)


def orphan(script: Script) -> None:
    """A program is killed and its memory stays allocated without an owner."""
    end = script.last(3 * HOUR_SECONDS)
    script.number("noise", QUIET_BYTES)
    kind = script.word("as", script.dice.choice(ORPHANS))
    host(script, (0.05, 0.9))
    killed = script.dice.uniform(15 * MINUTE_SECONDS, 45 * MINUTE_SECONDS)
    if not script.inject:
        script.end(killed)
        return
    script.end(killed, cast("Ending", f"orphan-{kind}"))
    script.truth = Truth("orphan", injected_at=killed, ends_at=end)


def crash(script: Script) -> None:
    """Memory runs out and the program crashes, once or in a loop of restarts."""
    times = int(script.number("times", script.dice.choice((1, 1, 4))))
    end = script.last(3 * HOUR_SECONDS)
    script.number("noise", QUIET_BYTES)
    at = 0.0
    for number in range(times):
        share = script.dice.uniform(0.1, 0.3)
        killed = at + script.dice.uniform(8 * MINUTE_SECONDS, 12 * MINUTE_SECONDS)
        last = number + 1 == times
        if number == 0:
            script.program("load")
        else:
            script.start(at)
        ready = script.fill(at + 1.0, share * script.size_bytes, 20.0)
        work(script, ready, killed if script.inject or not last else end, 0, QUIET_BYTES)
        brim = killed - script.dice.uniform(5.0, 180.0)
        if script.inject:
            room = 0.998 * script.size_bytes - CONTEXT_BYTES - share * script.size_bytes - 2.3 * GIB
            script.fill(brim - 30.0, room, 30.0)
            script.end(killed, "crash")
            if number == 0:
                script.truth = Truth("crash", injected_at=killed, ends_at=killed)
            if number == 2 and killed < end:
                script.truth = Truth("crash-loop", injected_at=killed, ends_at=killed)
        elif not last:
            script.end(killed)
        at = killed + script.dice.uniform(2.0, 8.0) * MINUTE_SECONDS


def stress(script: Script) -> None:
    """Fill the device and hold the memory. Engines whose memory has contents write and verify a pattern."""
    fill = script.number("fill", 0.9) if script.inject else 0.5
    end = script.last(HOUR_SECONDS)
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    size, block = fill * script.size_bytes, GIB
    for number in range(int(size // block)):
        at = 1.0 + 0.25 * number
        script.allocate(at, block, program)
        if not script.truth.kind and (number + 1) * block + CONTEXT_BYTES > NEARLY_ALL * script.size_bytes:
            script.truth = Truth("pressure", injected_at=at, ends_at=end)
    for at in every(1.0, script.duration, 10.0):
        script.busy(at, 1.0, program)


def flush_storm(script: Script) -> None:
    """Allocate and free continuously, with repeated flushes."""
    period = script.number("period", 2.0)
    script.last(HOUR_SECONDS)
    script.number("noise", QUIET_BYTES)
    program = script.program("load")
    script.fill(1.0, 0.2 * script.size_bytes, 10.0)
    level = LevelStep(script, 512 * MIB, program)
    for at in every(12.0, script.duration, 1.0):
        level.to(at, script.dice.uniform(0.0, 0.3) * script.size_bytes)
        script.busy(at, script.dice.uniform(0.3, 0.9), program)
    for at in every(12.5, script.duration, period):
        script.flush(at, program)
