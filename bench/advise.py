"""Limits of ``gpumond fleet advise`` from the first half of recorded curves, compared with the second half.

    python -m bench.advise TRACE [--save]

TRACE is a CSV file (or .csv.gz) with time, uuid, used_bytes and size_bytes of GPUs. Each GPU is a workload that has its
GPU for itself. The trace has used and no live bytes: the need of a program is at most this.

The frontier is what other rules reach, chosen with the second half known: a limit at the peak plus a headroom, for the
workloads whose peak has not risen in the last part of the first half.
"""

from __future__ import annotations

import csv
import gzip
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bench.result import publish
from gpumond.facts.units import GIB
from gpumond.features.fleet.advise import DEFAULT_HEADROOM_RATIO, advise_program

HEADROOMS = (0.0, 0.05, DEFAULT_HEADROOM_RATIO, 0.2)
OTHER_HEADROOMS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
SETTLED_PARTS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75)
"""Last parts of the first half in which a peak must not rise by more than RISE."""
MAX_RISE_RATIO = 0.01
EXCEEDED_COUNTS = (0, 1, 2, 5, 12)


def read_curves(path: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return time, used and size bytes of each GPU."""
    curves: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            curves[row["uuid"]].append((float(row["time"]), float(row["used_bytes"]), float(row["size_bytes"])))
    return curves


def is_settled(points: Sequence[tuple[float, float, float]], until: float) -> float:
    """Return the last part of the time until then in which the peak has not risen."""
    peak, risen = 0.0, points[0][0]
    for at, used, _ in points:
        if at < until:
            risen = at if used > peak * (1 + MAX_RISE_RATIO) else risen
            peak = max(peak, used)
    return (until - risen) / (until - points[0][0])


def frontier(
    curves: Mapping[str, Sequence[tuple[float, float, float]]], halfway: Mapping[str, float]
) -> dict[str, float]:
    """Return the highest part of the allocated GiB-hours that a rule saves, by the most workloads that exceed it."""
    rows = [
        (
            max(used for at, used, _ in points if at < halfway[uuid]),
            max(used for at, used, _ in points if at >= halfway[uuid]),
            points[0][2],
            points[-1][0] - halfway[uuid],
            is_settled(points, halfway[uuid]),
        )
        for uuid, points in curves.items()
    ]
    allocated = sum(whole * seconds for _, _, whole, seconds, _ in rows)
    best = dict.fromkeys(EXCEEDED_COUNTS, 0.0)
    for headroom, least in product(OTHER_HEADROOMS, SETTLED_PARTS):
        limited = [(row, row[0] * (1 + headroom)) for row in rows if row[4] >= least]
        limited = [(row, limit) for row, limit in limited if limit < row[2]]
        exceeded = sum(row[1] > limit for row, limit in limited)
        saved = sum((row[2] - limit) * row[3] for row, limit in limited) / allocated
        best |= {most: max(saved, own) for most, own in best.items() if exceeded <= most}
    return {f"at_most_{most}": round(saved, 4) for most, saved in best.items()}


def main() -> None:
    curves = read_curves(Path(sys.argv[1]))
    halfway = {uuid: points[0][0] + (points[-1][0] - points[0][0]) / 2 for uuid, points in curves.items()}
    figures: dict[str, object] = {"workloads": len(curves), "headroom": DEFAULT_HEADROOM_RATIO}
    for headroom in HEADROOMS:
        exceeded, limited, saved, foreseen = 0, 0, 0.0, 0.0
        allocated, hours_above, hours_of_all = 0.0, 0.0, 0.0
        for uuid, points in sorted(curves.items()):
            first = [used for at, used, _ in points if at < halfway[uuid]]
            second = [(at, used) for at, used, _ in points if at >= halfway[uuid]]
            whole = points[0][2]
            hours = (second[-1][0] - second[0][0]) / 3600
            middle = points[0][0] + (halfway[uuid] - points[0][0]) / 2
            earlier = max(used for at, used, _ in points if at < middle)
            needs = {"needed_bytes": max(first), "earlier_bytes": earlier, "usual_bytes": statistics.median(first)}
            advice = advise_program((uuid,), "", hours=hours, device_bytes=whole, headroom_ratio=headroom, **needs)
            limited += advice.limit_bytes is not None
            limit = whole if advice.limit_bytes is None else advice.limit_bytes
            above = [used for _, used in second if used > limit]
            exceeded += bool(above)
            hours_above += hours * len(above) / len(second)
            hours_of_all += hours
            allocated += whole * hours / GIB
            saved += (whole - limit) * hours / GIB
            foreseen += (whole - max(used for _, used in second)) * hours / GIB
        figures[f"{headroom:.0%}"] = {
            "limited": limited,
            "exceeded": exceeded,
            "exceeded_ratio": round(exceeded / len(curves), 4),
            "time_above_ratio": round(hours_above / hours_of_all, 6),
            "allocated_gibibyte_hours": round(allocated, 1),
            "saved_gibibyte_hours": round(saved, 1),
            "saved_ratio": round(saved / allocated, 4),
            "saved_if_the_peak_were_known_ratio": round(foreseen / allocated, 4),
        }
    publish("advise", figures | {"saved_ratio_of_other_rules": frontier(curves, halfway)})


if __name__ == "__main__":
    main()
