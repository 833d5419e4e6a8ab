"""Scenarios of training and inference programs: those with a problem (P1 to P10), healthy ones (N1 to N11), and loads
on devices and on gpumond itself. No I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple, cast

from gpumond.facts.units import GIB, HOUR_SECONDS, MIB, MINUTE_SECONDS
from gpumond.features.loadgen.scenario_builder import (
    CONTEXT_BYTES,
    MIN_LOUD_NOISE_BYTES,
    QUIET_NOISE_BYTES,
    WANDER_SECONDS,
    ExpectedVerdict,
    Option,
    PlanBuilder,
    ProgramEnding,
    RandomWalk,
    VaryingAmount,
    draw_noise,
    every,
    scenario,
    start_program,
    work,
)

MAX_RATE_BYTES_PER_SECOND = 512 * MIB / MINUTE_SECONDS
"""Maximum rate: faster growth fills the device before a diagnosis is possible."""
SEGMENT_BYTES = 2 * MIB
"""Size of a segment; blocks of a multiple of it leave no hole."""
EVALUATION_BLOCK_BYTES = 512 * MIB
"""Size of the blocks that an evaluation allocates."""
ORPHAN_KINDS = ("unlisted", "gone", "holder")
ORPHANS_HELP = (
    "how the driver shows the memory: unlisted (no process), gone (the killed pid) or holder (a process that has the "
    "GPU open)"
)
PRESSURE_RATIO = 0.95
"""Used share above which a device is under pressure."""


@scenario(
    "leak-linear",
    "p2",
    "every iteration retains a tensor that isn't needed",
    "leak",
    shape=("         ..·'", "    ..·''    ", "..·'         "),
    options=(Option("rate", "size", "2, 8, 32, 128 or 512 MiB", "bytes leaked per minute", 1),),
)
def linear(builder: PlanBuilder) -> None:
    rate = builder.choose_number("rate", builder.rng.choice((2, 8, 32, 128, 512)) * MIB) / MINUTE_SECONDS
    noise_bytes = draw_noise(builder)
    slow = noise_bytes >= MIN_LOUD_NOISE_BYTES or rate < 30 * MIB / MINUTE_SECONDS
    builder.choose_length(6 * HOUR_SECONDS if slow else 3 * HOUR_SECONDS)
    onset = _onset(builder, start_program(builder, noise_bytes=noise_bytes))
    leak_steadily(builder, onset, rate)


@scenario(
    "leak-per-epoch",
    "p1",
    "every epoch leaks a small block; within an epoch, memory rises and falls by 16 GiB",
    "leak",
    shape=("      /|/|/|", "  /|/|‾ ‾ ‾ ", "/|‾ ‾       "),
    options=(
        Option("step", "size", "4, 100 or 254 MiB", "bytes leaked per epoch", 1),
        Option("period", "duration", "1, 5 or 20 min", "duration of an epoch", 10.0),
    ),
)
def per_epoch(builder: PlanBuilder) -> None:
    size = builder.choose_number("step", builder.rng.choice((4, 100, 254)) * MIB)
    period = builder.choose_number("period", builder.rng.choice((1, 5, 20)) * MINUTE_SECONDS)
    end = builder.choose_length(9 * HOUR_SECONDS if period > 10 * MINUTE_SECONDS else 5 * HOUR_SECONDS)
    ready = start_program(builder, (0.15, 0.3))
    ramp = VaryingAmount(builder, 256 * MIB)
    for epoch in every(ready, end, period):
        for part in range(32):  # the sawtooth within an epoch
            at = epoch + 0.95 * period * part / 32
            if at < end:
                ramp.resize(at, 16 * GIB * (part + 1) / 32)
        if epoch + 0.97 * period < end:
            ramp.resize(epoch + 0.97 * period, 0)
    first_at = ready + period * (0.99 + int(builder.rng.uniform(5 * MINUTE_SECONDS, 40 * MINUTE_SECONDS) / period))
    _leak(builder, "stairs", first_at, size / period, [(at, size) for at in every(first_at, end, period)])


@scenario(
    "leak-load",
    "p3",
    "every request leaks a small block; without requests, memory doesn't grow",
    "leak",
    shape=("         _____", "    ____/     ", "___/          "),
    options=(
        Option("step", "size", "5, 50 or 150 MiB", "bytes leaked per request", 1),
        Option("requests", "number", "0.02 to 1", "requests per second while busy", 0.0001, 100.0),
    ),
)
def under_load(builder: PlanBuilder) -> None:
    leaked_bytes = builder.choose_number("step", builder.rng.choice((5, 50, 150)) * MIB)
    max_rate = min(1.0, MAX_RATE_BYTES_PER_SECOND / leaked_bytes)
    rate = builder.choose_number("requests", math.exp(builder.rng.uniform(math.log(0.02), math.log(max_rate))))
    end = builder.choose_length(6 * HOUR_SECONDS)
    ready = start_program(builder)
    onset = _onset(builder, ready)
    requests = builder.random("requests")
    phases = builder.random("phases")
    leaks, at = [], ready
    while at < end:
        idle_at = min(end, at + phases.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS))
        at += requests.expovariate(rate)
        while at < idle_at:
            if at >= onset:
                leaks.append((at, leaked_bytes))
            at += requests.expovariate(rate)
        until = min(end, idle_at + phases.uniform(5 * MINUTE_SECONDS, 20 * MINUTE_SECONDS))
        builder.steps = [step for step in builder.steps if step.action != "busy" or not idle_at <= step.at < until]
        builder.busy(idle_at, 0.0)
        at = until
    _leak(builder, "load-proportional", onset, None, leaks)


@scenario(
    "leak-irregular",
    "p4",
    "0.2 to 2 GiB are leaked at random times",
    "leak",
    shape=("           |‾‾", "   |‾‾‾‾‾‾‾   ", "|‾‾           "),
    options=(Option("period", "duration", "20 min", "mean time between two leaks", 1.0),),
)
def irregular(builder: PlanBuilder) -> None:
    period = builder.choose_number("period", 20 * MINUTE_SECONDS)
    end = builder.choose_length(9 * HOUR_SECONDS)
    onset = _onset(builder, start_program(builder))
    jumps = builder.random("jumps")
    leaks, at = [], onset
    while at < end:
        leaks.append((at, jumps.uniform(0.2, 2.0) * GIB))
        at += jumps.expovariate(1 / period)
    _leak(builder, "stairs", onset, None, leaks)


@scenario(
    "leak-compile-cache",
    "p5",
    "every new shape adds 20 to 200 MiB of compiled code, in the pool or outside it",
    "leak",
    shape=("        _-‾   ", "    _-‾       ", "_-‾           "),
    options=(
        Option("period", "duration", "1 to 5 min", "time between two new shapes", 1.0),
        Option(
            "where",
            "word",
            "random",
            "location of the compiled code: pool or outside",
            words=("pool", "outside"),
        ),
    ),
)
def compile_cache(builder: PlanBuilder) -> None:
    period = builder.choose_number("period", builder.rng.uniform(1.0, 5.0) * MINUTE_SECONDS)
    outside = builder.choose_word("where", builder.rng.choice(("outside", "pool"))) == "outside"
    end = builder.choose_length(8 * HOUR_SECONDS)
    onset = _onset(builder, start_program(builder))
    shapes = builder.random("shapes")
    leaks, at = [], onset
    while at < end:
        leaks.append((at, shapes.uniform(20, 200) * MIB))
        at += shapes.uniform(0.7, 1.3) * period
    _leak(builder, "linear", onset, None, leaks, outside)


@scenario(
    "leak-at-eval",
    "p9",
    "an evaluation allocates 20 to 28 GiB and frees half of it",
    "leak",
    shape=("         |\\___", "   |\\____|    ", "___|          "),
    options=(Option("period", "duration", "20 to 40 min", "time between two evaluations", 120.0),),
)
def at_evaluation(builder: PlanBuilder) -> None:
    period = builder.choose_number("period", builder.rng.uniform(20.0, 40.0) * MINUTE_SECONDS)
    end = builder.choose_length(5 * HOUR_SECONDS)
    ready = start_program(builder, (0.12, 0.2))
    first_at = ready + builder.rng.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS)
    sizes = builder.random("evaluations")
    ramp, leaks = VaryingAmount(builder, EVALUATION_BLOCK_BYTES), []
    for at in every(first_at, end, period):
        pieces = round(sizes.uniform(20, 28) * GIB / (2 * EVALUATION_BLOCK_BYTES))
        for piece in range(pieces):
            moment = at + 60.0 * piece / pieces
            ramp.resize(moment, (piece + 1) * EVALUATION_BLOCK_BYTES)
            leaks.append((moment, EVALUATION_BLOCK_BYTES))
        ramp.resize(at + 90.0, 0)
    _leak(builder, "stairs", first_at, None, leaks, freed_after_seconds=90.0)


def leak_steadily(builder: PlanBuilder, onset: float, rate: float) -> None:
    """Leak tensors at a constant rate, in bytes per second."""
    size = math.ceil(min(16 * MIB, max(2 * rate, min(4 * MIB, 60 * rate))) / SEGMENT_BYTES) * SEGMENT_BYTES
    gap = size / rate
    _leak(builder, "linear", onset, rate, [(at, size) for at in every(onset + gap, builder.duration, gap)])


def _onset(builder: PlanBuilder, ready: float) -> float:
    return ready + builder.rng.uniform(10 * MINUTE_SECONDS, 40 * MINUTE_SECONDS)


def _leak(
    builder: PlanBuilder,
    form: str,
    onset: float,
    rate: float | None,
    leaks: Sequence[tuple[float, float]],
    outside: bool = False,
    freed_after_seconds: float | None = None,
) -> None:
    """Leak blocks of the sizes at the times, and set the truth. ``rate``: mean rate, computed from the blocks if None.

    ``freed_after_seconds``: seconds after which the blocks are freed without the injection.
    """
    if not builder.inject and freed_after_seconds is None:
        return
    leaks = [(at, size) for at, size in leaks if at < builder.duration]
    for at, size in leaks:
        block = builder.allocate(at, size, outside=outside)
        if not builder.inject and freed_after_seconds is not None:
            builder.free(at + freed_after_seconds, block)
    if builder.inject and leaks:
        builder.leaked = leaks
        builder.expected_verdict = ExpectedVerdict("leak", form, injected_at=onset, slope_bytes_per_second=rate)


@scenario(
    "fragmentation",
    "p6",
    "live memory is constant, but the allocator holds more and more",
    "fragmentation",
    shape=("held      _.-'", "     _.-'     ", "live ---------"),
    options=(
        Option("share", "fraction", "42 to 50%", "fraction of the GPU that is live", 0.05, 0.5),
        Option("over", "duration", "1.5 to 2.5 h", "time until the GPU is full", 60.0),
    ),
    views=("agent",),
)
def fragmentation(builder: PlanBuilder) -> None:
    """Blocks are allocated in pairs. One of each pair is freed, and its successor is larger than the hole.

    The peak of live memory in every step is constant. Without the injection the successors fit the holes.
    """
    end = builder.choose_length(6 * HOUR_SECONDS)
    share = builder.choose_number("share", builder.rng.uniform(0.42, 0.5))
    fill_seconds = builder.choose_number("over", builder.rng.uniform(1.5, 2.5) * HOUR_SECONDS)
    size = int(builder.rng.uniform(48, 96)) // 2 * 2 * MIB
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    program = builder.program("load")
    step = builder.rng.uniform(15.0, 40.0)
    pairs: deque[tuple[int, int, int]] = deque()  # size and blocks
    for number in range(int(share * builder.size_bytes / (2 * size))):
        pairs.append(allocate_pair(builder, 1.0 + 0.2 * number, size))
    ready = 10.0 + 0.2 * len(pairs)
    activations = VaryingAmount(builder, 512 * MIB, program)
    peaks = list(every(ready, end, step))
    for at in peaks:
        for part in range(6):
            activations.resize(at + step * part / 20, 4 * GIB * (part + 1) / 6)
        activations.resize(at + 0.9 * step, 0)
        builder.busy(at, builder.rng.uniform(0.7, 0.9), program)
    onset = ready + builder.rng.uniform(10 * MINUTE_SECONDS, 30 * MINUTE_SECONDS)
    times = [at + 0.5 * step for at in peaks if onset <= at < onset + fill_seconds]
    freed_pairs = len(pairs) * 1.4  # all of the first generation, and a part of the second
    freed_bytes, freed_count = 0, 0
    for number, at in enumerate(times, 1):
        while freed_count < freed_pairs * number / len(times):
            size, doomed, _ = pairs.popleft()
            builder.free(at, doomed)
            freed_bytes, freed_count = freed_bytes + size, freed_count + 1
            larger = int(1.25 * size) // (2 * MIB) * 2 * MIB if builder.inject else size
            if freed_bytes >= 2 * larger:
                pairs.append(allocate_pair(builder, at, larger))
                freed_bytes -= 2 * larger
    if builder.inject:
        builder.expected_verdict = ExpectedVerdict("fragmentation", injected_at=onset, ends_at=end)


def allocate_pair(builder: PlanBuilder, at: float, size: int) -> tuple[int, int, int]:
    """Allocate two neighbors of one segment. Returns their size and both blocks."""
    builder.free(at, builder.allocate(at, 2 * size))
    return size, builder.allocate(at, size), builder.allocate(at, size)


@scenario(
    "orphan",
    "p7",
    "a program is killed, but its memory stays allocated",
    "orphan",
    shape=("used ---------", "             ", "pid  ----x    "),
    options=(Option("as", "word", "random", ORPHANS_HELP, words=ORPHAN_KINDS),),
    views=("agent", "process"),
)
def orphan(builder: PlanBuilder) -> None:
    end = builder.choose_length(3 * HOUR_SECONDS)
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    kind = builder.choose_word("as", builder.rng.choice(ORPHAN_KINDS))
    start_program(builder, (0.05, 0.9))
    killed_at = builder.rng.uniform(15 * MINUTE_SECONDS, 45 * MINUTE_SECONDS)
    if not builder.inject:
        builder.end(killed_at)
        return
    builder.end(killed_at, cast("ProgramEnding", f"orphan-{kind}"))
    builder.expected_verdict = ExpectedVerdict("orphan", injected_at=killed_at, ends_at=end)


@scenario(
    "crash",
    "p8",
    "memory runs out and the program crashes, once or in a loop of restarts",
    "crash",
    verdict_note=", or crash-loop if there are three or more crashes",
    shape=("    |‾|       ", "    / |    /‾|", "---'  |___/  |"),
    options=(Option("times", "number", "1 or 4", "number of crashes", 1, 20),),
    neighbors=False,
)
def crash(builder: PlanBuilder) -> None:
    times = int(builder.choose_number("times", builder.rng.choice((1, 1, 4))))
    end = builder.choose_length(3 * HOUR_SECONDS)
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    at = 0.0
    for index in range(times):
        share = builder.rng.uniform(0.1, 0.3)
        killed_at = at + builder.rng.uniform(8 * MINUTE_SECONDS, 12 * MINUTE_SECONDS)
        is_last = index + 1 == times
        if index == 0:
            builder.program("load")
        else:
            builder.start(at)
        ready = builder.fill(at + 1.0, share * builder.size_bytes, 20.0)
        work(builder, ready, killed_at if builder.inject or not is_last else end, 0, QUIET_NOISE_BYTES)
        filled_at = killed_at - builder.rng.uniform(5.0, 180.0)
        if builder.inject:
            room = 0.998 * builder.size_bytes - CONTEXT_BYTES - share * builder.size_bytes - 2.3 * GIB
            builder.fill(filled_at - 30.0, room, 30.0)
            builder.end(killed_at, "crash")
            if index == 0:
                builder.expected_verdict = ExpectedVerdict("crash", injected_at=killed_at, ends_at=killed_at)
            if index == 2 and killed_at < end:
                builder.expected_verdict = ExpectedVerdict("crash-loop", injected_at=killed_at, ends_at=killed_at)
        elif not is_last:
            builder.end(killed_at)
        at = killed_at + builder.rng.uniform(2.0, 8.0) * MINUTE_SECONDS


@scenario(
    "stress",
    "",
    "fill the GPU, hold the memory, and verify its contents",
    "pressure",
    verdict_note=", if --fill is at least 95%; otherwise none",
    shape=(" .----------", " |          ", "/           "),
    options=(Option("fill", "fraction", "90%", "fraction of the GPU", 0.01, 0.99),),
    neighbors=False,
)
def stress(builder: PlanBuilder) -> None:
    """Fill the device and hold the memory. Backends whose memory has contents write and verify a pattern."""
    fill = builder.choose_number("fill", 0.9) if builder.inject else 0.5
    end = builder.choose_length(HOUR_SECONDS)
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    program = builder.program("load")
    size, block_bytes = fill * builder.size_bytes, GIB
    for number in range(int(size // block_bytes)):
        at = 1.0 + 0.25 * number
        builder.allocate(at, block_bytes, program)
        if (
            not builder.expected_verdict.kind
            and (number + 1) * block_bytes + CONTEXT_BYTES > PRESSURE_RATIO * builder.size_bytes
        ):
            builder.expected_verdict = ExpectedVerdict("pressure", injected_at=at, ends_at=end)
    for at in every(1.0, builder.duration, 10.0):
        builder.busy(at, 1.0, program)


@scenario(
    "flush-storm",
    "",
    "allocate and free continuously, with repeated flushes",
    "",
    shape=(" |\\ |\\|\\  |\\", " | \\|   \\|  ", "/           "),
    options=(Option("period", "duration", "2 s", "time between two flushes", 0.05),),
    neighbors=False,
)
def flush_storm(builder: PlanBuilder) -> None:
    period = builder.choose_number("period", 2.0)
    builder.choose_length(HOUR_SECONDS)
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    program = builder.program("load")
    builder.fill(1.0, 0.2 * builder.size_bytes, 10.0)
    level = VaryingAmount(builder, 512 * MIB, program)
    for at in every(12.0, builder.duration, 1.0):
        level.resize(at, builder.rng.uniform(0.0, 0.3) * builder.size_bytes)
        builder.busy(at, builder.rng.uniform(0.3, 0.9), program)
    for at in every(12.5, builder.duration, period):
        builder.flush(at, program)


@scenario(
    "warm-up",
    "n1",
    "memory grows to a plateau and stays there",
    "",
    shape=("     ______", "  .-'      ", " /         "),
    options=(
        Option("time", "duration", "1 to 20 min", "warm-up time constant", 1.0),
        Option("share", "fraction", "30 to 85%", "fraction of the GPU at the plateau", 0.12, 0.9),
    ),
)
def warm_up(builder: PlanBuilder) -> None:
    time_constant = builder.choose_number(
        "time", math.exp(builder.rng.uniform(math.log(1.0), math.log(20.0))) * MINUTE_SECONDS
    )
    plateau = builder.choose_number("share", builder.rng.uniform(0.3, 0.85)) * builder.size_bytes
    end = builder.choose_length(4 * HOUR_SECONDS)
    start_program(builder, (0.02, 0.08), draw_noise(builder))
    level = VaryingAmount(builder, 64 * MIB)
    for at in every(5.0, min(end, 9 * time_constant), 5.0):
        level.resize(at, (plateau - 0.1 * builder.size_bytes) * (1 - math.exp(-at / time_constant)))


@scenario(
    "autotune",
    "n2",
    "large workspaces are allocated in the first minutes, then released",
    "",
    shape=(" |‾|       ", " | |       ", "/   ‾‾‾‾‾‾‾"),
    options=(Option("share", "fraction", "50 to 90%", "fraction of the GPU at the peak", 0.1, 0.9),),
)
def autotune(builder: PlanBuilder) -> None:
    peak = builder.choose_number("share", builder.rng.uniform(0.5, 0.9)) * builder.size_bytes
    lasting = peak * builder.rng.uniform(0.15, 0.4)
    builder.choose_length(3 * HOUR_SECONDS)
    program = builder.program("load")
    ready = builder.fill(1.0, lasting, 15.0)
    trials, trials_end = VaryingAmount(builder, 256 * MIB), ready + builder.rng.uniform(1.0, 3.0) * MINUTE_SECONDS
    for at in every(ready, trials_end, 4.0):
        trials.resize(at, (peak - lasting) * builder.rng.uniform(0.3, 1.0))
    trials.resize(trials_end, 0)
    builder.flush(trials_end + 1.0)
    work(builder, trials_end + 2.0, builder.duration, program, draw_noise(builder))


@scenario(
    "preallocated",
    "n3",
    "one pool takes most of the GPU at startup and keeps it",
    "",
    shape=(" |‾‾‾‾‾‾‾‾‾", " |         ", "-'         "),
    options=(Option("share", "fraction", "60 to 94%", "fraction of the GPU", 0.15, 0.95),),
)
def preallocated(builder: PlanBuilder) -> None:
    share = builder.choose_number("share", builder.rng.uniform(0.6, 0.94))
    builder.choose_length(6 * HOUR_SECONDS)
    builder.choose_number("noise", QUIET_NOISE_BYTES)
    program = builder.program("load")
    builder.fill(5.0, 0.1 * builder.size_bytes, 15.0)
    builder.allocate(25.0, (share - 0.1) * builder.size_bytes - GIB)
    load = RandomWalk(builder.random("load"), 0.25, WANDER_SECONDS)
    for at in every(30.0, builder.duration, 10.0):
        builder.busy(at, 0.4 + load.value_after(10.0), program)


@scenario(
    "cache-saturates",
    "n4",
    "a cache grows only when a request is larger than all earlier ones, which becomes rarer over time",
    "",
    shape=("       .--'‾", "   .-'      ", " /'         "),
    options=(
        Option("time", "duration", "2 to 6 h", "time until the cache has 95% of its final size", 60.0),
        Option("requests", "number", "0.1 to 1", "requests per second", 0.001, 100.0),
        Option("share", "fraction", "30 to 60%", "fraction of the GPU at the end", 0.05, 0.6),
    ),
)
def saturating_cache(builder: PlanBuilder) -> None:
    growth_seconds = builder.choose_number("time", builder.rng.uniform(2.0, 6.0) * HOUR_SECONDS)
    rate = builder.choose_number("requests", builder.rng.uniform(0.1, 1.0))
    full_bytes = builder.choose_number("share", builder.rng.uniform(0.3, 0.6)) * builder.size_bytes
    end = builder.choose_length(9 * HOUR_SECONDS)
    ready = start_program(builder, (0.1, 0.25))
    # So that the cache reaches 95% of its size after that time.
    usual = 0.95 * full_bytes / max(1.0, math.log(rate * growth_seconds))
    requests = builder.random("requests")
    arena, largest, at = VaryingAmount(builder, 32 * MIB), 0.0, ready
    while at < end:
        size = min(full_bytes, requests.expovariate(1 / usual))
        if size > largest:
            largest = size
            arena.resize(at, largest)
        at += requests.expovariate(rate)


@scenario(
    "periodic-eval",
    "n5",
    "a periodic evaluation allocates more, and frees all of it",
    "",
    shape=("   /|    /| ", "  / |   / | ", "-'  '--'  '-"),
    options=(
        Option("period", "duration", "5 to 60 min", "time between two evaluations", 30.0),
        Option("step", "size", "5 to 20 GiB", "bytes allocated by an evaluation", 1),
    ),
)
def periodic_evaluation(builder: PlanBuilder) -> None:
    period = builder.choose_number("period", builder.rng.uniform(5.0, 60.0) * MINUTE_SECONDS)
    builder.choose_length(max(4 * HOUR_SECONDS, 8 * period))
    seconds = min(0.6 * period, builder.rng.uniform(1.0, 10.0) * MINUTE_SECONDS)
    size = builder.choose_number("step", builder.rng.uniform(5, 20) * GIB)
    ready = start_program(builder, (0.15, 0.4), draw_noise(builder))
    ramp = VaryingAmount(builder, 256 * MIB)
    for at in every(ready + builder.rng.uniform(0.2, 1.0) * period, builder.duration - seconds - 2.0, period):
        for part in range(20):
            ramp.resize(at + seconds * part / 20, size * (part + 1) / 20)
        ramp.resize(at + seconds, 0)
        builder.flush(at + seconds + 1.0)


@scenario(
    "curriculum",
    "n6",
    "the batch size grows permanently, in steps that are hours apart",
    "",
    shape=("         ___", "    ____|   ", "___|        "),
    options=(
        Option("times", "number", "1 to 3", "number of steps", 1, 10),
        Option("step", "size", "2 to 20 GiB", "bytes added by each step", 1),
    ),
)
def curriculum(builder: PlanBuilder) -> None:
    steps = int(builder.choose_number("times", builder.rng.choice((1, 2, 3))))
    builder.choose_length(9 * HOUR_SECONDS)
    at = start_program(builder, (0.1, 0.2), draw_noise(builder)) + builder.rng.uniform(0.5, 2.0) * HOUR_SECONDS
    for _ in range(steps):
        builder.fill(at, builder.choose_number("step", 0) or builder.rng.uniform(2, min(20, 48 / steps)) * GIB, 5.0)
        at += builder.rng.uniform(1.5, 3.5) * HOUR_SECONDS


@scenario(
    "fleet",
    "n7",
    "one of several programs that share a load: a daily cycle with sudden changes",
    "",
    shape=("   _.-._|‾|_ ", " .'         '", "'            "),
    options=(Option("step", "size", "4 GiB", "amplitude of the daily cycle", 1),),
)
def fleet(builder: PlanBuilder) -> None:
    """Programs, each on its own device, share one load: a daily cycle, and changes of 1.5 GiB per minute."""
    programs = int(builder.choose_number("programs", 4))
    end = builder.choose_length(24 * HOUR_SECONDS)
    builder.choose_number("noise", 64 * MIB)
    swing = builder.choose_number("step", 4 * GIB)
    noon = builder.rng.uniform(0, 24) * HOUR_SECONDS
    shared = builder.random("shared load")
    load = RandomWalk(shared, 0.5 * GIB, 20 * MINUTE_SECONDS)
    jump, jump_ends, course = 0.0, 0.0, []
    for at in every(60.0, end, 30.0):
        if at > jump_ends and shared.random() < 30.0 / HOUR_SECONDS:
            jump, jump_ends = shared.uniform(0.75, 3.0) * GIB, at + shared.uniform(2, 20) * MINUTE_SECONDS
        rising = jump if at <= jump_ends else 0.0
        course.append(
            (at, swing * math.cos(2 * math.pi * (at - noon) / (24 * HOUR_SECONDS)) + load.value_after(30.0) + rising)
        )
    for device in range(programs):
        rng = builder.random(f"program {device}")
        program = builder.program(f"load-{device}", device=device)
        lasting = rng.uniform(0.2, 0.6) * builder.size_bytes
        builder.fill(1.0, lasting, 50.0, program)
        level, gain, deviation = VaryingAmount(builder, 64 * MIB, program), rng.uniform(0.7, 1.3), 0.0
        for at, value in course:
            change = value - deviation
            deviation += change * min(1.0, 1.5 * GIB / 2 / max(1.0, abs(change)))  # 1.5 GiB a minute
            level.resize(at, 6 * GIB + gain * deviation + rng.gauss(0.0, 0.1 * GIB))
            builder.flush(at + 1.0, program)  # the driver's reading decreases, too
            builder.busy(at, 0.5 + deviation / (16 * GIB), program)


@scenario("steady", "", "steady work, constant memory", "", shape=("            ", " .----------", "/           "))
def steady(builder: PlanBuilder) -> None:
    builder.choose_length(2 * HOUR_SECONDS)
    start_program(builder, (0.2, 0.8), draw_noise(builder))


SERVING_BYTES = 48 * GIB
"""Size of the devices of a public inference fleet, from whose curves the scenarios of serving programs (N8 to N11 and
P10) have their levels (GiB), durations and shares of busy time: GPU memory in use of 51 GPUs, 43 GPU-days, one sample
every 57 s. A program rests while its value changes by less than 0.02 GiB from sample to sample; else it is busy. 32 of
the GPUs serve requests all day, and 9 others load and unload models. A level is that of the device and contains the
CUDA context.
"""
WEIGHTS_BYTES = 2 * GIB
"""Permanent memory of a program. The fleet's programs use more nearly all the time."""
HALF_SEGMENT_BYTES = 32 * MIB
"""Half of a segment that slow fragmentation splits."""

QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
Levels = tuple[float, ...]
"""Used GiB at each of the quantiles."""


class LoadPattern(NamedTuple):
    """Rest and busy periods alternate. Their durations are log-normal: mean, and deviation of the logarithm."""

    rest_seconds: tuple[float, float]
    busy_seconds: tuple[float, float]
    rest_levels: Levels
    busy_levels: Levels


REQUEST_PATTERN = LoadPattern(
    (10.8 * MINUTE_SECONDS, 1.65),
    (7.8 * MINUTE_SECONDS, 1.15),
    (13.3, 19.5, 21.1, 22.2, 24.2, 24.3, 24.5, 27.3, 34.6),
    (10.9, 12.9, 14.4, 18.0, 20.4, 22.1, 23.8, 24.3, 29.3),
)
"""The 32 GPUs that serve requests. The level of a busy program hardly depends on the previous sample (correlation 0.1).
"""
CHANGE_SECONDS = 30.0
"""Time between two levels of a busy program, which is less than that between two samples of the fleet."""
MAX_PERIOD_SECONDS = 5 * HOUR_SECONDS
"""Longest period on these GPUs."""

MODEL_PATTERN = LoadPattern(
    (68.2 * MINUTE_SECONDS, 1.0),
    (3.5 * MINUTE_SECONDS, 1.0),
    (0.0, 9.0, 14.6, 22.5, 25.3, 29.8, 31.2, 33.9, 39.1),
    (8.5, 11.0, 14.4, 20.9, 24.0, 26.2, 29.5, 30.9, 38.7),
)
"""The 9 GPUs that load models. The rest periods are those of a quarter of an hour or more: half of them lasted 19 to 83
minutes, and a twentieth at least four hours.
"""

BUSY_RATIOS = (
    *(0.18, 0.81, 0.93, 0.82, 0.36, 0.86, 0.94, 0.97, 0.90, 0.75, 0.39, 0.29),
    *(0.30, 0.38, 0.21, 0.18, 0.08, 0.09, 0.05, 0.03, 0.02, 0.01, 0.02, 0.02),
)
"""Busy share of each hour of a day on the 32 GPUs, from the morning to the end of the night. The curves end after 23
hours; the last value repeats the one before.
"""
MEAN_BUSY_RATIO = 0.42

DRIFT_BYTES = (0.5 * GIB, 1.6 * GIB)
"""Growth in six hours. If the upper quartile of a curve of the fleet rises from six hours to the next six, it rises by
0.5 GiB in the median and by 1.6 GiB at the quantile 0.9.
"""
MAX_DRIFT_SECONDS = 15 * HOUR_SECONDS
"""Limit of the growth, so at most 4 GiB are stranded: a fifth of the pool is not reported as fragmentation."""


LEAK_RATE_OPTION = Option("rate", "size", "no leak", "bytes leaked per minute")


@scenario(
    "serving-bimodal",
    "n8",
    "memory is constant while a serving program is idle, and varies by gigabytes while it's busy",
    "",
    shape=("‾‾‾| |‾‾| ‾‾", "   ||  |'|  ", "    |    |  "),
    options=(LEAK_RATE_OPTION,),
    neighbors=False,
    size_bytes=SERVING_BYTES,
)
def serving_bimodal(builder: PlanBuilder) -> None:
    """Serve requests with the mean busy share of a day at all times."""
    _serve(builder, REQUEST_PATTERN)
    _leak_at_random_onset(builder, builder.choose_number("rate", 0.0))


@scenario(
    "serving-nightly",
    "n9",
    "a serving program is busy during the day, and idle for most of the night",
    "",
    shape=("‾|'|||'|‾‾‾‾", " ||||||     ", "  | |       "),
    options=(LEAK_RATE_OPTION,),
    neighbors=False,
    size_bytes=SERVING_BYTES,
)
def serving_nightly(builder: PlanBuilder) -> None:
    _serve(builder, REQUEST_PATTERN, BUSY_RATIOS)
    _leak_at_random_onset(builder, builder.choose_number("rate", 0.0))


@scenario(
    "model-loads",
    "n10",
    "models are loaded, then unloaded after tens of minutes to hours",
    "",
    shape=("   ___    __", "  |   |  |  ", "__|   |__|  "),
    options=(LEAK_RATE_OPTION,),
    neighbors=False,
    size_bytes=SERVING_BYTES,
)
def model_loads(builder: PlanBuilder) -> None:
    _serve(builder, MODEL_PATTERN)
    _leak_at_random_onset(builder, builder.choose_number("rate", 0.0))


@scenario(
    "leak-serving",
    "p10",
    "a serving program leaks, in addition to the pattern of serving-bimodal",
    "leak",
    shape=("        _.|'||", "   _|''|| |  ", "||'| |        "),
    options=(Option("rate", "size", "16, 32, 64, 128 or 256 MiB", "bytes leaked per minute", 1),),
    neighbors=False,
    size_bytes=SERVING_BYTES,
)
def leak_serving(builder: PlanBuilder) -> None:
    """Leak in the program of `serving_bimodal`, which always holds more than 1 GiB."""
    rate = builder.choose_number("rate", builder.rng.choice((16, 32, 64, 128, 256)) * MIB)
    _serve(builder, REQUEST_PATTERN)
    _leak_at_random_onset(builder, rate)


@scenario(
    "slow-fragmentation",
    "n11",
    "live memory is constant, and the memory that the allocator holds grows slowly, up to a limit",
    "",
    shape=("held   __..--", "  __--''     ", "live ---------"),
    options=(
        Option("step", "size", "0.5 to 1.6 GiB", "growth of the held memory in six hours", 1, DRIFT_BYTES[1]),
        Option("over", "duration", "6 to 15 h", "time until the growth ends", 60.0, MAX_DRIFT_SECONDS),
        LEAK_RATE_OPTION,
    ),
    neighbors=False,
    size_bytes=SERVING_BYTES,
)
def slow_fragmentation(builder: PlanBuilder) -> None:
    """Free halves of a limited number of segments. Their successors are larger than the holes."""
    end = builder.choose_length(24 * HOUR_SECONDS)
    growth = builder.choose_number("step", builder.rng.uniform(*DRIFT_BYTES))
    over = builder.choose_number("over", builder.rng.uniform(6 * HOUR_SECONDS, MAX_DRIFT_SECONDS))
    live = builder.rng.uniform(16, 22) * GIB
    program = builder.program("load")
    count = math.ceil(growth * over / (6 * HOUR_SECONDS) / HALF_SEGMENT_BYTES)
    halves = [allocate_pair(builder, 1.0, HALF_SEGMENT_BYTES)[1] for _ in range(count)]
    ready = builder.fill(5.0, live - 2 * HALF_SEGMENT_BYTES * count, 20.0)
    onset = ready + builder.rng.uniform(0.5, 3.0) * HOUR_SECONDS
    for number, half in enumerate(halves):
        at = onset + over * number / count
        builder.free(at, half)
        builder.allocate(at, HALF_SEGMENT_BYTES + 2 * MIB)
    requests = _ResizedBlock(builder)
    for at in every(ready, end, MINUTE_SECONDS):
        requests.resize(at, builder.rng.uniform(1, 3) * GIB)
        builder.busy(at, builder.rng.uniform(0.3, 0.9), program)
    _leak_at_random_onset(builder, builder.choose_number("rate", 0.0))


class _ResizedBlock:
    """A block whose size changes. The freed memory is returned to the device, as in the fleet."""

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder, self._block = builder, 0

    def resize(self, at: float, size: float) -> None:
        if self._block:
            self._builder.free(at, self._block)
            self._builder.flush(at)
        self._block = self._builder.allocate(at, size)


def _serve(builder: PlanBuilder, pattern: LoadPattern, busy_ratios: Sequence[float] = (MEAN_BUSY_RATIO,)) -> None:
    """Alternate between rest and busy periods for 24 hours. ``busy_ratios``: busy share of each hour of a day.

    A share changes the durations of both: their ratio is that of busy to rest in the hour.
    """
    end = builder.choose_length(24 * HOUR_SECONDS)
    morning = builder.rng.uniform(0, 24)
    course, use = builder.random("course"), builder.random("utilisation")
    program = builder.program("load")
    builder.fill(1.0, WEIGHTS_BYTES, 20.0)
    work, busy, until = _ResizedBlock(builder), True, 0.0
    for at in every(30.0, end, CHANGE_SECONDS):
        change = at >= until
        if change:
            busy = not busy
            share = busy_ratios[int(morning + at / HOUR_SECONDS) % len(busy_ratios)]
            odds = share / (1 - share) * (1 - MEAN_BUSY_RATIO) / MEAN_BUSY_RATIO
            seconds = _duration(course, pattern, busy) * (odds if busy else 1 / odds) ** 0.5
            until = at + min(MAX_PERIOD_SECONDS, seconds)
        if busy or change:
            used = _level(course, pattern.busy_levels if busy else pattern.rest_levels) * GIB
            work.resize(at, max(0.0, used - WEIGHTS_BYTES - CONTEXT_BYTES))
        builder.busy(at, use.uniform(0.5, 0.9) if busy else use.uniform(0.0, 0.1), program)


def _duration(rng: Random, pattern: LoadPattern, busy: bool) -> float:
    mean, deviation = pattern.busy_seconds if busy else pattern.rest_seconds
    return rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)


def _level(rng: Random, levels: Levels) -> float:
    """Return a random level: linear between the quantiles, and none below the first or above the last."""
    share = min(max(rng.random(), QUANTILES[0]), QUANTILES[-1])
    index = bisect_left(QUANTILES, share, 1)
    (low, high), (low_level, high_level) = QUANTILES[index - 1 : index + 1], levels[index - 1 : index + 1]
    return low_level + (high_level - low_level) * (share - low) / (high - low)


def _leak_at_random_onset(builder: PlanBuilder, rate: float) -> None:
    """Leak ``rate`` bytes a minute from 4 to 10 hours after the start on, as `bench.leaks` does in recorded curves."""
    onset = builder.random("onset").uniform(4, 10) * HOUR_SECONDS
    if rate:
        leak_steadily(builder, onset, rate / MINUTE_SECONDS)
