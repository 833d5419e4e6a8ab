"""``gpumond fleet report``: print the memory that namespaces, users, workloads or machines held without use,
from series that Prometheus recorded over a day or a week.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from gpumond.cli.arguments import DONE, NOTHING_TO_DO, above_zero, duration
from gpumond.facts.errors import ConfigError
from gpumond.facts.units import byte_size, duration as readable
from gpumond.features.fleet.discovery import Point, Prometheus, Sample, add_prometheus, make_prometheus
from gpumond.view import html_report
from gpumond.view.text import moment, safe, table


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
    "idle_and_reclaimable": "gpumond_idle_and_reclaimable_bytes",
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
    idle_and_reclaimable: float
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


def expression(series: str, metric: str, label: str, job: str | None, length: float) -> str:
    """Return the PromQL expression of the GiB-hours by a label."""
    selected = f"{recorded(series, metric, job)}[{int(length)}s]"
    return f"sum by ({label}) (sum_over_time({selected})) / {RECORDED_PER_HOUR} / 2 ^ 30"


async def report(prometheus: Prometheus, by: str, job: str | None, length: float, price: Price | None) -> list[Usage]:
    """Return the use in the last seconds, those who waste most first. Raises DiscoveryError."""
    level = LEVELS[by]
    metrics = {"used": level.used, **MEASURES}
    columns = {
        name: await prometheus.query(expression(level.series, metric, level.label, job, length))
        for name, metric in metrics.items()
    }
    return usages(columns, level.label, price)


async def curves(
    prometheus: Prometheus, by: str, job: str | None, length: float, until: float
) -> Mapping[str, Sequence[Point]]:
    """Return the bytes of all owners or machines over the seconds until a unix time, by the fields of Usage.

    Raises DiscoveryError.
    """
    level, step = LEVELS[by], max(60.0, length / CURVE_POINTS)
    return {
        name: await prometheus.query_range(f"sum({recorded(level.series, metric, job)})", until - length, until, step)
        for name, metric in {"used": level.used, "wasted": MEASURES["wasted"]}.items()
    }


def usages(columns: Mapping[str, Sequence[Sample]], label: str, price: Price | None) -> list[Usage]:
    """Return the rows of a report from the results of its queries, by the names of the fields of Usage."""
    hours: dict[str, dict[str, float]] = {}
    for column, samples in columns.items():
        for sample in samples:
            hours.setdefault(sample.labels.get(label, ""), {})[column] = sample.value
    rows = [_usage(name, amounts, price) for name, amounts in hours.items()]
    return sorted(rows, key=lambda row: (-row.wasted, row.name))


def _usage(name: str, hours: Mapping[str, float], price: Price | None) -> Usage:
    amounts = {field: hours.get(field, 0.0) for field in ("used", *MEASURES)}
    return Usage(name=name, cost=None if price is None else price.of(amounts["wasted"]), **amounts)


NO_NAME = "(none)"
WASTED = "WASTED: memory of idle programs, reclaimable and stranded memory of the others"
_MARKUP = re.compile(r"[\\`*_{}\[\]<>()#!|&~@:]")
"""Characters that Markdown interprets, in links and mentions too."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a formula in a spreadsheet."""
FIELDS = ("used", "idle_held", "idle_and_reclaimable", "wasted", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prometheus(parser)
    parser.add_argument("--by", choices=tuple(LEVELS), default="user", help="group by this label (default: user)")
    parser.add_argument(
        "--for",
        dest="duration",
        type=duration,
        default="7d",
        metavar="DURATION",
        help="period to report, up to now (default: 7d)",
    )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="maximum number of rows; 0 for all (default: 20)"
    )
    parser.add_argument(
        "--price", type=float, metavar="AMOUNT", help="price of one GPU hour, to add the cost; requires --gpu-memory"
    )
    parser.add_argument(
        "--gpu-memory",
        type=above_zero(byte_size),
        metavar="SIZE",
        help="memory of one GPU, such as 80GiB; requires --price",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "markdown", "json"), default="table", help="output format (default: table)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report with charts as one HTML file")


async def run(arguments: argparse.Namespace) -> int:
    length = arguments.duration
    if length < 1 or arguments.limit < 0:
        raise ConfigError("--for must be at least one second, and --limit not negative")
    price, prometheus = _price(arguments), make_prometheus(arguments)
    if prometheus is None:
        raise ConfigError("--prometheus is required: a report reads only its recorded series")
    html_report.check(arguments.html)
    rows = await report(prometheus, arguments.by, arguments.job, length, price)
    shown = rows[: arguments.limit or None]
    {"table": _table, "csv": _csv, "markdown": _markdown, "json": _json}[arguments.format](arguments.by, shown)
    if rows and arguments.html is not None:
        now = time.time()
        over_time = await curves(prometheus, arguments.by, arguments.job, length, now)
        html_report.write(arguments.html, _page(arguments.by, shown, over_time, now - length, now))
    if not rows:
        print("gpumond: Prometheus has no recorded series; load deploy/prometheus/gpumond.rules.yaml", file=sys.stderr)
    return DONE if rows else NOTHING_TO_DO


def _price(arguments: argparse.Namespace) -> Price | None:
    if arguments.price is None and arguments.gpu_memory is None:
        return None
    if arguments.price is None or arguments.gpu_memory is None or not arguments.price >= 0:
        raise ConfigError("--price and --gpu-memory must both be given, and be positive")
    return Price(arguments.price, int(arguments.gpu_memory))


def _table(by: str, rows: Sequence[Usage]) -> None:
    header, *cells = _cells(by, rows)
    print(table([header[0], *(f">{name}" for name in header[1:])], cells))
    if rows:
        print(f"\nGiB-hours. {WASTED}")


def _markdown(by: str, rows: Sequence[Usage]) -> None:
    header, *cells = ([_MARKUP.sub(r"\\\g<0>", safe(cell)) for cell in line] for line in _cells(by, rows))
    for line in (header, ["---", *("---:" for _ in header[1:])], *cells):
        print("| " + " | ".join(line) + " |")


def _csv(by: str, rows: Sequence[Usage]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    fields = [name for name in FIELDS if name != "cost" or any(row.cost is not None for row in rows)]
    writer.writerow([by, *(f"{name}_gibibyte_hours" if name != "cost" else name for name in fields)])
    writer.writerows([_cell(row.name), *(f"{getattr(row, name):.6g}" for name in fields)] for row in rows)


def _cell(name: str) -> str:
    """Return text that a spreadsheet shows, and does not calculate."""
    return "'" * name.startswith(_FORMULA) + safe(name)


def _json(by: str, rows: Sequence[Usage]) -> None:
    print(json.dumps([asdict(row) for row in rows], indent=2))


def _page(by: str, rows: Sequence[Usage], over_time: Mapping[str, Sequence[Point]], begin: float, end: float) -> str:
    """Return the report as HTML. ``over_time``: bytes by name of a field."""
    header, *cells = _cells(by, rows)
    used, wasted = sum(row.used for row in rows), sum(row.wasted for row in rows)
    bars = [
        (
            row.name or NO_NAME,
            (
                html_report.Bar("before", row.used, f"{row.wasted:.1f} of {row.used:.1f} GiB-hours"),
                html_report.Bar("after", row.wasted, ""),
            ),
        )
        for row in rows
    ]
    parts = [
        html_report.paragraph(f"{moment(begin)} to {moment(end)} ({readable(end - begin)})"),
        html_report.paragraph(f"{wasted:.1f} of {used:.1f} GiB-hours in these rows were wasted. {WASTED}"),
        html_report.bars(f"wasted part of the used GiB-hours by {by}", bars, overlaid=True),
        html_report.table([header[0], *(f">{name}" for name in header[1:])], cells),
    ]
    for name, points in over_time.items():
        if points:
            parts += [html_report.heading(f"{name.capitalize()} memory of all"), html_report.curve(points, None, ())]
    return html_report.page(f"Use of GPU memory by {by}", parts)


def _cells(by: str, rows: Sequence[Usage]) -> Iterator[list[str]]:
    """Yield the header, and a line for each row."""
    priced = any(row.cost is not None for row in rows)
    yield [by.upper(), "USED", "IDLE", "IDLE+RECLAIMABLE", "WASTED", "OF USED", *(["COST"] if priced else [])]
    for row in rows:
        hours = (row.used, row.idle_held, row.idle_and_reclaimable, row.wasted)
        share = f"{row.wasted / row.used:.0%}" if row.used else "-"
        cost = [] if row.cost is None else [f"{row.cost:.2f}"]
        yield [row.name or NO_NAME, *(f"{number:.1f}" for number in hours), share, *cost]
