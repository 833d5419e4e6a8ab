"""Verdicts that are hard to give: leaks and healthy growth, pressure, crashes, memory without an owner, and others.

    python -m bench.hard [--seeds N] [--first SEED] [--shape NAME ...] [--jobs N] [--save]

Each shape of bench.hard_shapes runs with N seeds (5), with an agent and as the driver alone sees it, in virtual time,
and each case of bench.hard_verdicts once for each seed. The tests of the verdicts were changed with seeds below 900.
The first one is 900, so the figures are those of seeds that nobody has looked at.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from statistics import median
from typing import NamedTuple

from bench.diagnosis import MINUTE
from bench.hard_shapes import DEVICE_BYTES, HEALTHY, HOUR, LEAKS, MIB, NEVER, STOPPING, Shape
from bench.hard_verdicts import CASES, judge
from bench.result import publish
from gpumond.diagnosis.diagnosis import Diagnosis, diagnose
from gpumond.facts.engines import EngineProcess, EngineReading
from gpumond.facts.frame import Verdict
from gpumond.facts.program import Program, StepUsage
from gpumond.facts.snapshot import Sensors, Snapshot
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

TICKS = 100
SECONDS_BETWEEN_LIVES = 60.0
VIEWS = ("agent", "process")
TOLERANCE, FACTOR = 0.25, 1.5
LOADED_SECONDS = 100.0
"""Time after which every shape has loaded its model."""


class Run(NamedTuple):
    """Outcome of a run. Times are seconds; ``leak_at``: that of the first leak verdict, None without one.

    ``error``: the first rate divided by the true one. ``half``: the time to full at half of the headroom divided by
    the true one; None without a leak then. ``inside``: whether the interval contained it.
    """

    name: str
    seed: int
    view: str
    second_life: bool
    onset: float
    end: float
    leak_at: float | None
    growing_at: float | None
    filling_at: float | None
    slope: float | None
    true_slope: float | None
    half: float | None
    inside: bool | None

    @property
    def false(self) -> bool:
        return self.leak_at is not None and self.leak_at < self.onset


class Other(NamedTuple):
    """Outcome of a case of bench.hard_verdicts."""

    kind: str
    name: str
    seed: int
    deserved: bool
    wrong: bool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=900)
    parser.add_argument("--shape", nargs="*", default=[*HEALTHY, *LEAKS])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=float, help="seconds between two samples, for a quick estimate")
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    seeds = range(wanted.first, wanted.first + wanted.seeds)
    jobs = [(name, seed, view, False) for name in wanted.shape for seed in seeds for view in VIEWS]
    jobs += [(name, seed, view, True) for name in wanted.shape if name in STOPPING for seed in seeds for view in VIEWS]
    with ProcessPoolExecutor(wanted.jobs) as pool:
        runs = list(pool.map(partial(run, every=wanted.every), jobs, chunksize=4))
        others = list(pool.map(_other, [(name, seed) for name in CASES for seed in seeds], chunksize=4))
    for line in (*listing(runs), *(f"{one.kind} {one.name} {one.seed}: wrong" for one in others if one.wrong)):
        print(line)
    publish("hard", figures(runs, wanted.seeds) | other_figures(others))


def run(job: tuple[str, int, str, bool], every: float | None = None) -> Run:
    """Carry out one run. A healthy one ends with its first leak verdict."""
    name, seed, view, second = job
    healthy = name in HEALTHY
    shape = {**HEALTHY, **LEAKS}[name](Random(f"{name}/{seed}"))
    shape = replace(shape, every=every) if every else shape
    noise = Random(f"{name}/{seed}/{view}")
    length = shape.hours * HOUR
    life = length + SECONDS_BETWEEN_LIVES
    full_at = _full_at(shape, length)
    half_at = shape.onset + (full_at - shape.onset) / 2 if full_at < inf else inf
    diagnosis = Diagnosis()
    found: dict[str, float] = {}
    slope = true_slope = half = inside = None
    lives = 2 if second else shape.lives
    previous = SECONDS_BETWEEN_LIVES + 3000 if second else 0.0
    for number in range(lives):
        begin = number * (life + previous)
        for at, snapshot in _snapshots(shape, number, view, noise, min(length, full_at), begin):
            diagnosis = diagnose(diagnosis, snapshot)
            if second and number == 0:
                continue
            leak = None
            for verdict in diagnosis.verdicts:
                if verdict.kind == "leak":
                    leak = verdict
                if verdict.kind not in found:
                    found[verdict.kind] = at
                    if verdict.kind == "leak":
                        slope = _evidence(verdict, "slope_bytes_per_second")
                        true_slope = _true_slope(shape, at)
            if leak is not None and healthy:
                break
            if half is None and at >= half_at:
                half, inside = _at_half(leak, full_at - at, snapshot.taken_at)
                if leak is not None or at >= half_at + 0.4 * (full_at - half_at):
                    break
        if "leak" in found and (healthy or lives > 1):
            break
        for at in range(40):
            empty = make_device(
                used_bytes=0, size_bytes=DEVICE_BYTES, processes=(), sensors=Sensors(gpu_utilization_ratio=0.0)
            )
            moment = begin + length + 1 + at
            diagnosis = diagnose(diagnosis, _at(moment, empty))
    return Run(
        name=name,
        seed=seed,
        view=view,
        second_life=second,
        onset=shape.onset,
        end=min(length, full_at),
        leak_at=found.get("leak"),
        growing_at=found.get("growing"),
        filling_at=found.get("filling"),
        slope=slope,
        true_slope=true_slope,
        half=half,
        inside=inside,
    )


def _at(at: float, *devices: object, **fields: object) -> Snapshot:
    return make_snapshot(*devices, seq=int(at * 10) + 1, elapsed_seconds=at, taken_at=1e9 + at, **fields)  # type: ignore[arg-type]


def _snapshots(
    shape: Shape, life: int, view: str, rng: Random, until: float, begin: float
) -> Iterator[tuple[float, Snapshot]]:
    at, held, steps, done, at_end = 0.0, 0, 0, 0.0, None
    pid, ticks = 10 + life, TICKS + life
    slack = 300 * MIB
    while at < until:
        kept, act, outside = shape.kept(at), shape.activations(at), shape.outside(at)
        stepping = shape.step_seconds is not None and at > 60 and shape.stepping(at)
        live = int(kept + act * rng.random())
        peak = int(kept + act) + slack
        held = max(held, peak) if shape.sticky else peak
        used = int(held + outside + rng.gauss(0, shape.noise)) // (2 * MIB) * 2 * MIB
        used = max(MIB, min(DEVICE_BYTES, used))
        device = make_device(
            used_bytes=used,
            size_bytes=DEVICE_BYTES,
            processes=(make_process(pid, used, start_ticks=ticks, comm="train", uid=1000),),
            sensors=Sensors(gpu_utilization_ratio=shape.busy(at)),
        )
        reports: tuple[object, ...] = ()
        engines: tuple[EngineReading, ...] = ()
        if view == "agent":
            program = Program()
            if shape.step_seconds is not None:
                if stepping:
                    done += shape.every / shape.step_seconds
                    if int(done) > steps:
                        steps, at_end = int(done), int(kept)
                program = Program(step=StepUsage(steps=steps, live_bytes=at_end))
            pool = make_pool(live=live, cached=max(0, held - live))
            reports = (make_report(pid, (pool,), start_ticks=ticks, program=program),)
        if shape.load is not None:
            running, ratio = shape.load(at)
            engines = (
                EngineReading(
                    name="engine",
                    kind="vllm",
                    up=True,
                    running=running,
                    waiting=0,
                    kv_cache_used_ratio=ratio,
                    processes=(EngineProcess(pid, ticks),),
                ),
            )
        yield at, _at(begin + at + 1, device, reports=reports, engines=engines)
        at += shape.every


def _level(shape: Shape, at: float) -> float:
    return shape.kept(at) + shape.activations(at) + shape.outside(at) + 300 * MIB


def _full_at(shape: Shape, length: float) -> float:
    """Return when a leak has filled the device: infinity if it does not within twice the run."""
    if shape.onset == inf or _level(shape, 2 * length) < DEVICE_BYTES:
        return inf
    at = 0.0
    while _level(shape, at) < DEVICE_BYTES:
        at += 10.0
    return at


def _true_slope(shape: Shape, at: float) -> float:
    """Return the mean growth since the onset; of an accelerating leak, that of the last third of this time."""
    since = min(max(LOADED_SECONDS, shape.onset), at - 60)
    if shape.accelerates:
        since = at - (at - since) / 3
    return (shape.kept(at) + shape.outside(at) - shape.kept(since) - shape.outside(since)) / (at - since)


def _at_half(leak: Verdict | None, left: float, now: float) -> tuple[float, bool]:
    if leak is None or leak.time_to_full_seconds is None:
        return inf, False
    inside = False
    if leak.fit is not None and leak.fit.full_at_earliest is not None:
        inside = leak.fit.full_at_earliest <= now + left <= (leak.fit.full_at_latest or inf)
    return leak.time_to_full_seconds / left, inside


def _evidence(verdict: Verdict, name: str) -> float | None:
    return dict(verdict.evidence).get(name)


def listing(runs: Sequence[Run]) -> Iterator[str]:
    groups: defaultdict[str, list[Run]] = defaultdict(list)
    for one in runs:
        groups[one.name + (" again" if one.second_life else "")].append(one)
    for name, own in groups.items():
        cells = []
        for view in VIEWS:
            mine = [one for one in own if one.view == view]
            if own[0].name in HEALTHY:
                times = [f"{one.leak_at / MINUTE:.0f}" for one in mine if one.leak_at is not None]
                fill = sum(one.filling_at is not None for one in mine)
                cells.append(f"{view}: leaks {len(times)}/{len(mine)} at {','.join(times) or '-'} min, filling {fill}")
            else:
                delays = ",".join(
                    "-" if one.leak_at is None else f"{(one.leak_at - one.onset) / MINUTE:.0f}" for one in mine
                )
                rates = ",".join(f"{one.slope / one.true_slope:.2f}" for one in mine if one.slope and one.true_slope)
                halves = ",".join(
                    ("-" if one.half is None else f"{one.half:.2f}") + ("+" if one.inside else "") for one in mine
                )
                cells.append(f"{view}: {delays} min; rate {rates}; half {halves}")
        yield f"{name:28} {' | '.join(cells)}"


def figures(runs: Sequence[Run], seeds: int) -> dict[str, object]:
    healthy = [one for one in runs if one.name in HEALTHY and not one.second_life]
    again = [one for one in runs if one.second_life]
    leaks = [one for one in runs if one.name in LEAKS]
    hits = [one for one in leaks if one.leak_at is not None and not one.false]
    halves = [one for one in leaks if one.half is not None]
    curved = [one for one in halves if one.name in ("quadratic", "quadratic_stepped", "exponential", "power")]
    result: dict[str, object] = {
        "seeds": seeds,
        "healthy_shapes": len({one.name for one in healthy}),
        "leaking_shapes": len({one.name for one in leaks}),
        "healthy_called_leak": _by_view(healthy, lambda one: one.leak_at is not None),
        "of_those_never": _by_view([one for one in healthy if one.name in NEVER], lambda one: one.leak_at is not None),
        "second_life_called_leak": _by_view(again, lambda one: one.leak_at is not None),
        "leaks_found": _by_view(leaks, lambda one: one.leak_at is not None and not one.false),
        "leaks_before_their_onset": _by_view(leaks, lambda one: one.false),
        "first_rate_within_25_percent": _by_view(
            hits, lambda one: bool(one.slope and one.true_slope) and _is_near(one.slope, one.true_slope)
        ),
        "time_to_full_within_1.5": _by_view(halves, lambda one: 1 / FACTOR <= (one.half or 0.0) <= FACTOR),
        "time_to_full_within_1.5_accelerating": _by_view(curved, lambda one: 1 / FACTOR <= (one.half or 0.0) <= FACTOR),
        "interval_contains_it": _by_view(halves, lambda one: bool(one.inside)),
    }
    delays = [(one.leak_at or 0.0) - one.onset for one in hits]
    if delays:
        result["median_delay_minutes"] = round(median(delays) / MINUTE, 1)
    return result


def _other(job: tuple[str, int]) -> Other:
    name, seed = job
    case, failed = judge(CASES[name], seed)
    return Other(case.kind, name, seed, case.deserves, failed)


def other_figures(others: Sequence[Other]) -> dict[str, object]:
    kinds = sorted({one.kind for one in others})
    by_kind = {kind: [one.wrong for one in others if one.kind == kind] for kind in kinds}
    return {
        "other_verdicts_wrong": f"{sum(one.wrong for one in others)} of {len(others)}",
        "wrong_by_kind": {kind: f"{sum(own)} of {len(own)}" for kind, own in by_kind.items()},
        "wrong_although_not_deserved": f"{sum(one.wrong and not one.deserved for one in others)}",
    }


def _is_near(slope: float | None, true: float | None) -> bool:
    return slope is not None and true is not None and true > 0 and abs(slope / true - 1) <= TOLERANCE


def _by_view(runs: Iterable[Run], test: Callable[[Run], bool]) -> dict[str, str]:
    own = list(runs)
    return {
        view: f"{sum(test(one) for one in own if one.view == view)} of {sum(one.view == view for one in own)}"
        for view in VIEWS
    }


if __name__ == "__main__":
    main()
