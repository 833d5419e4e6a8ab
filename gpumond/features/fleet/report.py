"""Use of GPU memory over a day or a week by namespace, user, workload or machine, from recorded series alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpumond.features.fleet.prometheus import Point, Prometheus, Sample


class Level(NamedTuple):
    """Level of the recorded series, their label, and the metric of the used memory."""

    series: str
    label: str
    used: str


_OWNERS, _OF_OWNERS = "namespace_user_workload", "gpumond_process_memory_used_bytes"
LEVELS: Mapping[str, Level] = {
    "namespace": Level(_OWNERS, "pod_namespace", _OF_OWNERS),
    "user": Level(_OWNERS, "user", _OF_OWNERS),
    "workload": Level(_OWNERS, "workload", _OF_OWNERS),
    "machine": Level("instance", "instance", "gpumond_device_memory_used_bytes"),
}
"""Levels of a report; ``deploy/prometheus/gpumond.rules.yaml`` records their series."""

MEASURES: Mapping[str, str] = {
    "idle_held": "gpumond_idle_held_bytes",
    "returnable": "gpumond_returnable_bytes",
    "wasted": "gpumond_wasted_bytes",
}
CURVE_POINTS = 300
RECORDED_PER_HOUR = 60
"""Samples of a recorded series: the rules are evaluated once a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """GiB-hours of one owner or machine. ``cost``: that of the wasted memory, None without a price."""

    name: str
    used: float
    idle_held: float
    returnable: float
    wasted: float
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """Price of an hour of one GPU, and its memory in bytes."""

    per_hour: float
    gpu_bytes: int

    def of(self, gibibyte_hours: float) -> float:
        return gibibyte_hours * 2**30 / self.gpu_bytes * self.per_hour


def recorded(series: str, metric: str, job: str | None) -> str:
    """Return the selector of a recorded series; without a job, of all jobs."""
    return f"{series}:{metric}:sum" + (f"{{job={json.dumps(job)}}}" if job is not None else "")


def expression(series: str, metric: str, label: str, job: str | None, seconds: float) -> str:
    """Return the PromQL expression of the GiB-hours by a label."""
    selected = f"{recorded(series, metric, job)}[{int(seconds)}s]"
    return f"sum by ({label}) (sum_over_time({selected})) / {RECORDED_PER_HOUR} / 2 ^ 30"


async def report(prometheus: Prometheus, by: str, job: str | None, seconds: float, price: Price | None) -> list[Usage]:
    """Return the use in the last seconds, those who waste most first. Raises DiscoveryError."""
    level = LEVELS[by]
    metrics = {"used": level.used, **MEASURES}
    columns = {
        name: await prometheus.query(expression(level.series, metric, level.label, job, seconds))
        for name, metric in metrics.items()
    }
    return usages(columns, level.label, price)


async def curves(
    prometheus: Prometheus, by: str, job: str | None, seconds: float, until: float
) -> Mapping[str, Sequence[Point]]:
    """Return the bytes of all owners or machines over the seconds until a unix time, by the fields of Usage.

    Raises DiscoveryError.
    """
    level, step = LEVELS[by], max(60.0, seconds / CURVE_POINTS)
    return {
        name: await prometheus.query_range(f"sum({recorded(level.series, metric, job)})", until - seconds, until, step)
        for name, metric in {"used": level.used, "wasted": MEASURES["wasted"]}.items()
    }


def usages(columns: Mapping[str, Sequence[Sample]], label: str, price: Price | None) -> list[Usage]:
    """Return the rows of a report from the results of its queries, by the names of the fields of Usage."""
    hours: dict[str, dict[str, float]] = {}
    for column, samples in columns.items():
        for sample in samples:
            hours.setdefault(sample.labels.get(label, ""), {})[column] = sample.value
    rows = [_usage(name, own, price) for name, own in hours.items()]
    return sorted(rows, key=lambda row: (-row.wasted, row.name))


def _usage(name: str, own: Mapping[str, float], price: Price | None) -> Usage:
    wasted = own.get("wasted", 0.0)
    return Usage(
        name=name,
        used=own.get("used", 0.0),
        idle_held=own.get("idle_held", 0.0),
        returnable=own.get("returnable", 0.0),
        wasted=wasted,
        cost=None if price is None else price.of(wasted),
    )
