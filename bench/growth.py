"""``growing`` and quick leaks: delays on staircases with an agent, and ordinary shapes of six hours.

    python -m bench.growth [--seeds N] [--hours H] [--save]

Staircases keep 64 to 600 MiB a minute in blocks of 2 MiB, after a plateau of 10 to 20 minutes, in programs that count
steps and in others. Each ordinary shape of the load generator runs
with N seeds (24) for H hours (6), in virtual time at one sample a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from bench.diagnosis import NEVER_LEAKS
from bench.result import publish
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.program import StepUsage
from gpumond.facts.snapshot import Snapshot
from gpumond.features.loadgen.plan import plan
from tests.helpers.agents import GIB
from tests.helpers.curves import MIB, at_moment, of_device
from tests.helpers.simulated_snapshots import snapshots
from tests.helpers.values import make_pool, make_process, make_report

RATES = (64, 128, 300, 600)
BLOCK_BYTES = 2 * MIB
RECORD_BYTES = 16 * MIB
"""A curve grows as long as it rises by this above all values since ``growing`` began."""


class Staircase(NamedTuple):
    """``where``: 'plateau' or 'steps'; ``after``: seconds from the program's start until the growth."""

    where: str
    rate: int
    after: float
    first: float
    noise: float


class Shape(NamedTuple):
    run: str
    leaks: int
    growing: int
    hours: float
    ends: tuple[float, ...]
    """Seconds from the end of each growth until ``growing`` ended."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    stairs = list(staircases(wanted.seeds))
    jobs = [(name, seed, wanted.hours) for seed in range(wanted.seeds) for name in NEVER_LEAKS]
    with ProcessPoolExecutor() as pool:
        delays = list(pool.map(delays_of, stairs))
        shapes = list(pool.map(measure_shape, jobs))
    found = defaultdict[str, list[tuple[float | None, float | None]]](list)
    for stair, delay in zip(stairs, delays, strict=True):
        found[f"{stair.where}, {stair.rate} MiB/min"].append(delay)
    by_name = defaultdict[str, list[Shape]](list)
    for (name, _, _), shape in zip(jobs, shapes, strict=True):
        by_name[name].append(shape)
    figures = {
        "seeds": wanted.seeds,
        "hours_of_each_shape": wanted.hours,
        "staircases": {
            name: {"growing": summary([growing for growing, _ in own]), "leak": summary([leak for _, leak in own])}
            for name, own in found.items()
        },
        "shapes": {
            name: {
                "hours": round(sum(shape.hours for shape in own), 1),
                "leaks": [shape.run for shape in own for _ in range(shape.leaks)],
                "growing": sum(shape.growing for shape in own),
                "ended_after_seconds": summary([end for shape in own for end in shape.ends]),
                "latest_end": max(own, key=lambda shape: max(shape.ends, default=0.0)).run,
            }
            for name, own in by_name.items()
        },
    }
    publish("growth", figures)


def staircases(seeds: int) -> Iterator[Staircase]:
    for seed in range(seeds):
        rng = random.Random(seed)
        for rate in RATES:
            yield Staircase("plateau", rate, rng.uniform(600, 1200), rng.uniform(0, 15), rng.choice((0, 1)) * MIB)
            yield Staircase("steps", rate, rng.uniform(600, 1200), rng.uniform(0, 15), 0.0)


def delays_of(stair: Staircase) -> tuple[float | None, float | None]:
    """Return the seconds from the beginning of the growth to ``growing`` and to ``leak``; None if not found."""
    diagnosis, found = Diagnosis(), dict[str, float]()
    rng = random.Random(stair.first)
    for second in range(int(stair.after) + 2700):
        at = stair.first + second
        grown = max(0.0, second - stair.after) * stair.rate * MIB / 60
        live = int(20 * GIB + grown // BLOCK_BYTES * BLOCK_BYTES + rng.gauss(0, stair.noise))
        report = make_report(10, (make_pool(live=live, cached=GIB),))
        if stair.where == "steps":
            report = replace(report, program=replace(report.program, step=StepUsage(steps=2 * second, live_bytes=live)))
        process = make_process(10, live + 2 * GIB)
        snapshot: Snapshot = at_moment(at, of_device(live + 2 * GIB, (process,)), reports=(report,))
        diagnosis = diagnose(diagnosis, snapshot)
        for verdict in diagnosis.verdicts:
            found.setdefault(verdict.kind, second - stair.after)
        if "leak" in found:
            break
    return found.get("growing"), found.get("leak")


def measure_shape(job: tuple[str, int, float]) -> Shape:
    name, seed, hours = job
    diagnosis, before = Diagnosis(), frozenset[tuple[str, int | None, str]]()
    highest, grew = defaultdict[tuple[str, int | None], float](float), dict[tuple[str, int | None], float]()
    leaks, growing, ends = 0, 0, list[float]()
    planned = plan(name, seed, duration=hours * 3600)
    for snapshot in snapshots(planned):
        at = snapshot.elapsed_seconds
        diagnosis = diagnose(diagnosis, snapshot)
        active = frozenset((each.device_uuid, each.pid, each.kind) for each in diagnosis.verdicts)
        for uuid, pid, value in curves(snapshot):
            if (uuid, pid, "growing") in active - before or value > highest[uuid, pid] + RECORD_BYTES:
                highest[uuid, pid], grew[uuid, pid] = value, at
        leaks += sum(kind == "leak" for _, _, kind in active - before)
        growing += sum(kind == "growing" for _, _, kind in active - before)
        ends += [at - grew[uuid, pid] for uuid, pid, kind in before - active if kind == "growing"]
        before = active
    return Shape(f"{name} {seed} ({planned.observation.view})", leaks, growing, hours, tuple(ends))


def curves(snapshot: Snapshot) -> Iterator[tuple[str, int | None, float]]:
    for device in snapshot.devices:
        yield device.uuid, None, device.used_bytes or 0
        for process in device.processes or ():
            yield device.uuid, process.pid, process.used_bytes or 0


def summary(seconds: Sequence[float | None]) -> dict[str, object]:
    known = [one for one in seconds if one is not None]
    if not known:
        return {"of": len(seconds), "found": 0}
    return {
        "of": len(seconds),
        "found": len(known),
        "median_s": round(statistics.median(known)),
        "max_s": round(max(known)),
    }


if __name__ == "__main__":
    main()
