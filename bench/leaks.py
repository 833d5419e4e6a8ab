"""Leaks in recorded curves: false alerts, recall and delay of the serving test, and of variants of its constants.

    python -m bench.leaks TRACE [--seeds N] [--save]

TRACE is a CSV file (or .csv.gz) with time, uuid, used_bytes and size_bytes of GPUs without a leak. In each curve a leak
of each rate is injected 4 to 10 hours after its start, while the program holds more than 1 GiB, until the device is
full. Onsets within an hour of each other count once. ``--save`` keeps the figures, and writes the table into
docs/contributing/leak-tests.md. Cross-validation: in each of five groups of GPUs, the variant is used that has the
highest recall, with at most 0.05 false alerts a GPU-day, on the other four.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

from bench.result import publish
from gpumond.diagnosis.leak_criteria import CandidateCurve
from gpumond.diagnosis.serving_leak import SERVING_TESTS, ServingTest, UpperQuartiles, find_serving_leak
from gpumond.tick.history import (
    DEVICE_SIGNAL_COUNT,
    FIVE_MINUTES,
    MAX,
    MAX_PROCESS_SIGNALS,
    MINUTE,
    USED,
    Series,
    highest,
)

MIB, HOUR, DAY = 1 << 20, 3600.0, 86400.0
RATES = (16, 32, 64, 128, 256)
GROUPS = 5
MAX_FALSE_ALARMS = 0.05
DOCUMENT = Path(__file__).parent.parent / "docs" / "contributing" / "leak-tests.md"
BEGIN, END = "<!-- trade-off -->", "<!-- end of trade-off -->"

Points = list[tuple[float, float]]
Tests = Sequence[ServingTest]


def scaled_tests(**factors: float) -> Tests:
    return tuple(
        replace(test, **{name: getattr(test, name) * by for name, by in factors.items()}) for test in SERVING_TESTS
    )


VARIANTS: Mapping[str, Tests] = {
    "as it is": SERVING_TESTS,
    "without creeping": scaled_tests(min_creeps=inf),
    "creeping alone": scaled_tests(consistent_ratio=inf),
    "creeping of 8 minutes": scaled_tests(min_creeps=1.6),
    "margin x 2": scaled_tests(margin_bytes=2.0, margin_ratio=2.0),
    "without the test for steps": tuple(
        replace(test, max_two_steps_ratio=inf, between_steps_ratio=-inf) for test in SERVING_TESTS
    ),
    "only 16 blocks": SERVING_TESTS[2:3],
    "16 and 24 blocks": SERVING_TESTS[2:],
}


class Leak(NamedTuple):
    """One injected leak: the GPU, its rate in MiB a minute, and by variant the delay in minutes; None if missed."""

    uuid: str
    rate: int
    delays: Mapping[str, float | None]


class Injected(NamedTuple):
    """A leak to be injected into a curve, and the times of false alerts in the curve without it."""

    uuid: str
    rate: int
    start: float
    points: Points
    size: float
    alarms: Mapping[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    curves, sizes = read(wanted.trace)
    days = {uuid: sum(min(b - a, 300) for (a, _), (b, _) in pairwise(own)) / DAY for uuid, own in curves.items()}
    with ProcessPoolExecutor() as pool:
        alarms = dict(zip(curves, pool.map(onsets, curves.values(), map(sizes.__getitem__, curves)), strict=True))
        jobs = [job for seed in range(wanted.seeds) for job in injected_leaks(curves, sizes, alarms, seed)]
        leaks = list(pool.map(outcome, jobs))
    table = table_of(leaks, alarms, days)
    print(table)
    figures = {
        "gpus": len(curves),
        "gpu_days": round(sum(days.values()), 1),
        "seeds": wanted.seeds,
        "variants": {name: figures_of(name, leaks, alarms, days) for name in VARIANTS},
        "cross_validation": cross_validation(leaks, alarms, days),
    }
    publish("leaks", figures)
    if wanted.save:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")


def read(path: Path) -> tuple[dict[str, Points], dict[str, float]]:
    curves, sizes = defaultdict[str, Points](list), dict[str, float]()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            curves[row["uuid"]].append((float(row["time"]), float(row["used_bytes"])))
            sizes[row["uuid"]] = float(row["size_bytes"])
    return {uuid: sorted(points) for uuid, points in curves.items()}, sizes


def onsets(points: Points, size: float) -> dict[str, list[float]]:
    """Return, by variant, the times at which a leak is found, at least an hour apart."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    last = dict.fromkeys(VARIANTS, -HOUR)
    for at, candidate, quartiles in evaluations(points, size):
        for name, tests in VARIANTS.items():
            if find_serving_leak(candidate, quartiles, tests) is not None:
                if at - last[name] >= HOUR:
                    found[name].append(at)
                last[name] = at
    return found


def evaluations(
    points: Points, size: float, since: float = -inf
) -> Iterator[tuple[float, CandidateCurve, UpperQuartiles]]:
    """Yield the time, the candidate and the quartiles whenever a block has closed."""
    series, quartiles = Series(MAX_PROCESS_SIGNALS, points[0][0], 0.0), UpperQuartiles()
    device = Series(DEVICE_SIGNAL_COUNT, points[0][0], 0.0)
    for at, used in points:
        if series.add((at, used, nan, nan, nan, nan)) <= FIVE_MINUTES:
            continue
        quartiles.add(series, USED)
        if at > since:
            peak = highest(series.column(MINUTE, USED, MAX, 15))
            room = max(0.0, size - max(peak, used))
            yield at, CandidateCurve(series, device, USED, series.started, size, room, 1.0), quartiles


def injected_leaks(
    curves: Mapping[str, Points], sizes: Mapping[str, float], alarms: Mapping[str, Mapping[str, list[float]]], seed: int
) -> Iterator[Injected]:
    rng = random.Random(seed)
    for rate in RATES:
        for uuid, points in curves.items():
            start = points[0][0] + rng.uniform(4, 10) * HOUR
            if points[-1][0] - start > 4 * HOUR:
                yield Injected(uuid, rate, start, points, sizes[uuid], alarms[uuid])


def outcome(job: Injected) -> Leak:
    points = add_leak(job.points, job.start, job.rate, job.size)
    return Leak(job.uuid, job.rate, delays(points, job.start, job.size, job.alarms))


def add_leak(points: Points, start: float, rate: float, size: float) -> Points:
    curve: Points = []
    for at, used in points:
        extra = max(0.0, (at - start) / 60 * rate * MIB) if used > 1024 * MIB else 0.0
        if used + extra > size:
            break
        curve.append((at, used + extra))
    return curve


def delays(points: Points, start: float, size: float, alarms: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return, by variant, the minutes until a leak is found that is not found in the curve without it."""
    found: dict[str, float | None] = dict.fromkeys(VARIANTS)
    for at, candidate, quartiles in evaluations(points, size, start):
        for name, tests in VARIANTS.items():
            if found[name] is None and not any(at - HOUR <= alarm <= at for alarm in alarms[name]):
                found[name] = (at - start) / 60 if find_serving_leak(candidate, quartiles, tests) is not None else None
        if None not in found.values():
            break
    return found


def figures_of(
    name: str, leaks: Sequence[Leak], alarms: Mapping[str, Mapping[str, list[float]]], days: Mapping[str, float]
) -> dict[str, object]:
    rates: dict[str, object] = {}
    for rate in RATES:
        delays = [leak.delays[name] for leak in leaks if leak.rate == rate]
        known = [one for one in delays if one is not None]
        rates[str(rate)] = {
            "recall": round(len(known) / len(delays), 3) if delays else None,
            "of": len(delays),
            "median_delay_minutes": round(statistics.median(known)) if known else None,
        }
    count = sum(len(alarms[uuid][name]) for uuid in days)
    return {"false_alarms": count, "per_gpu_day": round(count / sum(days.values()), 3), "rates": rates}


def table_of(leaks: Sequence[Leak], alarms: Mapping[str, Mapping[str, list[float]]], days: Mapping[str, float]) -> str:
    lines = [f"| variant | false alerts per GPU-day | {' | '.join(map(str, RATES))} |", "|---|" + "---:|" * 6]
    for name in VARIANTS:
        own = figures_of(name, leaks, alarms, days)
        rates = own["rates"]
        assert isinstance(rates, dict)
        cells = [f"{one['recall']:.2f} / {one['median_delay_minutes']}" for one in rates.values() if one["recall"]]
        lines.append(f"| {name} | {own['per_gpu_day']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cross_validation(
    leaks: Sequence[Leak], alarms: Mapping[str, Mapping[str, list[float]]], days: Mapping[str, float]
) -> list[dict[str, object]]:
    groups = [sorted(days)[number::GROUPS] for number in range(GROUPS)]
    rows: list[dict[str, object]] = []
    for group in groups:
        others = [uuid for uuid in days if uuid not in group]
        quiet = [name for name in VARIANTS if _false_alarms_per_day(name, others, alarms, days) <= MAX_FALSE_ALARMS]
        best = max(quiet or VARIANTS, key=lambda name: _recall(name, others, leaks))
        rows.append(
            {
                "variant": best,
                "recall": round(_recall(best, group, leaks), 3),
                "false_alarms_per_gpu_day": round(_false_alarms_per_day(best, group, alarms, days), 3),
            }
        )
    return rows


def _recall(name: str, uuids: Sequence[str], leaks: Sequence[Leak]) -> float:
    own = [leak.delays[name] is not None for leak in leaks if leak.uuid in uuids]
    return sum(own) / len(own) if own else 0.0


def _false_alarms_per_day(
    name: str, uuids: Sequence[str], alarms: Mapping[str, Mapping[str, list[float]]], days: Mapping[str, float]
) -> float:
    return sum(len(alarms[uuid][name]) for uuid in uuids) / sum(days[uuid] for uuid in uuids)


if __name__ == "__main__":
    main()
