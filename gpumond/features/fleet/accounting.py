"""Use of GPU memory in a period, from the owners' metrics in Prometheus: queries, gaps, groups and prices.

A value at a step counts until the next step. Prometheus returns no value while a machine is not scraped, so a gap
is neither 0 nor the last value; ``Coverage`` counts it. Each expression takes the maximum over all labels but those of
the target and the owner, so the replicas of a Prometheus count once, whatever the name of their label.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from gpumond.facts.units import DAY_SECONDS, GIB
from gpumond.features.fleet.discovery import Point, Prometheus, SeriesSample, query_all

TARGET_LABELS = ("cluster", "job", "instance")
OWNER_LABELS = ("workload", "user", "pod_namespace", "slurm_account", "model", "job_id", "slurm_job")
"""Labels of an owner. Only series of programs have ``job_id`` and ``slurm_job``."""
LABEL_BY_COLUMN: Mapping[str, str] = {
    "namespace": "pod_namespace",
    "user": "user",
    "workload": "workload",
    "account": "slurm_account",
    "model": "model",
    "machine": "instance",
    "cluster": "cluster",
}
"""Labels by which rows are grouped, by the word of ``--by``. Those of teams and jobs are derived."""
TEAM_COLUMN, JOB_COLUMN = "team", "job"
COLUMNS = (*LABEL_BY_COLUMN, TEAM_COLUMN, JOB_COLUMN)
MEASURES = ("used", "idle_held", "idle_and_reclaimable", "wasted")
FINE_SECONDS, COARSE_SECONDS = 60, 300
"""Steps of a period of at most ``FINE_DAYS``, and of a longer one."""
FINE_DAYS = 7
MIN_PARTS, MAX_STEPS_PER_PART = 48, 360
"""A period has so many parts, or more if one would have more steps than this."""
MAX_CONCURRENT_QUERIES = 4

ScrapeTarget = tuple[str, str, str]


def columns_parser(columns: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the function that reads ``--by``; it raises ValueError for other columns than these."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if not set(names) <= set(columns) or len(set(names)) != len(names):
            raise ValueError(f"expected one or more of {', '.join(columns)}, separated by commas")
        return names

    return read


class Period(NamedTuple):
    """Unix times of the beginning and the end, multiples of ``step_seconds``."""

    begin: int
    end: int
    step_seconds: int

    @classmethod
    def of(cls, begin: float, end: float) -> Period:
        step_seconds = FINE_SECONDS if end - begin <= FINE_DAYS * DAY_SECONDS else COARSE_SECONDS
        until = int(end // step_seconds) * step_seconds
        return cls(min(int(begin // step_seconds) * step_seconds, until - step_seconds), until, step_seconds)

    @property
    def seconds(self) -> int:
        return self.end - self.begin

    def preceding(self) -> Period:
        """Return the period of the same length that ends with this one's begin."""
        return self._replace(begin=self.begin - self.seconds, end=self.begin)

    def parts(self) -> Iterator[Period]:
        steps = self.seconds // self.step_seconds
        length = self.step_seconds * min(MAX_STEPS_PER_PART, -(-steps // MIN_PARTS))
        for begin in range(self.begin, self.end, length):
            yield Period(begin, min(self.end, begin + length), self.step_seconds)


@dataclass(slots=True)
class Coverage:
    """Seconds for which a machine's values are known, and those for which it was a target of Prometheus.

    While Prometheus has no data of any machine, all count as its targets. A device that cannot be read is a part of its
    machine that is not known.
    """

    known_seconds: float = 0.0
    expected_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return min(1.0, self.known_seconds / self.expected_seconds) if self.expected_seconds else 0.0


@dataclass(slots=True)
class Accounts:
    """Use of each owner on each machine by measure, and what is known about the machines."""

    period: Period
    byte_seconds: dict[tuple[ScrapeTarget, tuple[str | None, ...]], dict[str, float]] = field(default_factory=dict)
    coverage: dict[ScrapeTarget, Coverage] = field(default_factory=dict)
    device_byte_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sizes of all devices times seconds, by model."""
    device_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Number of devices times seconds, by model."""
    curves: dict[str, list[Point]] = field(default_factory=dict)
    """Bytes of all owners in each part of the period that has data, by measure, at its middle: the mean over the time
    of its machines that is known."""

    def mean_device_bytes(self, model: str) -> float | None:
        """Return the mean size of a device of this model."""
        return self.device_byte_seconds[model] / self.device_seconds[model] if self.device_seconds.get(model) else None


def selector(metric: str, job: str | None, *matchers: str) -> str:
    """Return the selector of a metric; without a job, of all jobs."""
    all_matchers = [*matchers, *([] if job is None else [f"job={json.dumps(job)}"])]
    return metric + (f"{{{', '.join(all_matchers)}}}" if all_matchers else "")


def device_expression(job: str | None, metric: str, *matchers: str) -> str:
    """Return the expression of a metric of whole devices, with their model."""
    target = ", ".join(TARGET_LABELS)
    whole_devices = selector("gpumond_device_info", job, 'parent_uuid=""')
    return (
        f"max by ({target}, uuid) ({selector(metric, job, *matchers)}) * on ({target}, uuid) group_left (model) "
        f'label_replace(max by ({target}, uuid, name) ({whole_devices}), "model", "$1", "name", "(.*)")'
    )


def usage_queries(job: str | None, of_programs: bool = False) -> Mapping[str, str]:
    """Return the PromQL expression of each value of ``read_accounts``, at one time.

    ``of_programs``: used memory is that of programs, with their jobs, and the other measures are unknown.
    """
    target, owner = ", ".join(TARGET_LABELS), ", ".join(OWNER_LABELS)

    size = device_expression(job, "gpumond_device_memory_size_bytes")
    readable_devices = (
        f"count by ({target}) (max by ({target}, uuid) ({selector('gpumond_device_memory_used_bytes', job)}))"
    )
    all_devices = f"sum by ({target}) (max by ({target}, state) ({selector('gpumond_devices', job)}))"
    down = f"max by ({target}) ({selector('gpumond_driver_up', job)}) < 1"
    unattributed = device_expression(job, "gpumond_device_memory_share_bytes", 'share="unattributed"')
    if of_programs:
        names = ", ".join(name for name in OWNER_LABELS if name not in ("model", "slurm_account"))
        processes = device_expression(job, "gpumond_process_memory_used_bytes").replace(", uuid)", ", uuid, pid)", 1)
        infos = f"max by ({target}, pid, {names}) ({selector('gpumond_process_info', job)})"
        joined = f"{processes} * on ({target}, pid) group_left ({names}) {infos}"
        measures = {"used": f"sum by ({target}, {owner}) ({joined})"}
    else:
        measures = {
            name: f"max by ({target}, {owner}) ({selector(f'gpumond_owner_{name}_bytes', job)})" for name in MEASURES
        }
    return {
        **measures,
        "unattributed": f"sum by ({target}, model) ({unattributed})",
        "size": f"sum by (model) ({size})",
        "devices": f"count by (model) ({size})",
        "known": f"clamp_max({readable_devices} / {all_devices}, 1) or (({all_devices} == 0) unless ({down})) + 1",
    }


def sum_over_period(expression: str, part: Period) -> str:
    """Return the expression of the sum of an expression's values at the steps of a part."""
    return f"sum_over_time(({expression})[{part.seconds}s:{part.step_seconds}s])"


async def read_accounts(prometheus: Prometheus, job: str | None, period: Period, of_programs: bool = False) -> Accounts:
    """Read the values of a period. Raises DiscoveryError and ConfigError."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)

    async def query_part(expression: str, part: Period) -> Sequence[SeriesSample]:
        async with semaphore:
            at = part.end - part.step_seconds / 2  # the range includes the beginning, and excludes the end
            return await prometheus.query(sum_over_period(expression, part), at)

    async def query_parts(name: str, expression: str) -> list[tuple[str, Period, Sequence[SeriesSample]]]:
        parts = list(period.parts())
        results = await query_all(query_part(expression, part) for part in parts)
        return [(name, part, samples) for part, samples in zip(parts, results, strict=True)]

    answers = await query_all(query_parts(*each) for each in usage_queries(job, of_programs).items())
    values = [answer for answers_of_one in answers for answer in answers_of_one]
    jobs = {sample.labels.get("job", "") for name, _, samples in values if name == "known" for sample in samples}
    up = f"max by ({', '.join(TARGET_LABELS)}) (up{{job=~{json.dumps('|'.join(map(re.escape, sorted(jobs))))}}})"
    if jobs:
        for name, expression in {"listed": f"({up}) * 0 + 1", "any": f"count({up}) * 0 + 1"}.items():
            values += await query_parts(name, expression)
    return make_accounts(period, values)


def make_accounts(period: Period, values: Iterable[tuple[str, Period, Sequence[SeriesSample]]]) -> Accounts:
    """Return the accounts from the results of ``read_accounts``' queries: name, part and samples of each."""
    result = Accounts(period)
    known_seconds: defaultdict[ScrapeTarget, float] = defaultdict(float)
    target_seconds: defaultdict[ScrapeTarget, float] = defaultdict(float)
    totals: defaultdict[str, defaultdict[Period, float]] = defaultdict(lambda: defaultdict(float))
    for name, part, samples in values:
        for sample in samples:
            target = _target(sample)
            seconds = sample.value * period.step_seconds
            totals[name][part] += seconds
            if name == "known":
                known_seconds[target] += seconds
            elif name == "listed":
                target_seconds[target] += seconds
            elif name in ("size", "devices"):
                sums = result.device_byte_seconds if name == "size" else result.device_seconds
                sums[sample.labels.get("model", "")] += seconds
            elif name != "any":
                owner = _owner(sample, name)
                measures = result.byte_seconds.setdefault((target, owner), {})
                for measure in ("used", "wasted") if name == "unattributed" else (name,):  # it has no owner
                    measures[measure] = measures.get(measure, 0.0) + seconds
                    if measure != name:
                        totals[measure][part] += seconds
    gap = period.seconds - sum(totals["any"].values())
    for target in {*known_seconds, *target_seconds}:
        seconds = known_seconds[target]
        result.coverage[target] = Coverage(seconds, max(seconds, min(period.seconds, target_seconds[target] + gap)))
    target_count = len(target_seconds)
    for measure in ("used", "wasted"):
        result.curves[measure] = [
            ((part.begin + part.end) / 2, total / part.seconds / (_known_ratio(totals, part, target_count) or 1.0))
            for part, total in sorted(totals[measure].items())
        ]
    return result


def _known_ratio(totals: Mapping[str, Mapping[Period, float]], part: Period, target_count: int) -> float:
    """Return the known part of the targets' time in a part of the period; 0 if nothing is known about it."""
    gap = part.seconds - totals["any"][part]
    return Coverage(totals["known"][part], totals["listed"][part] + gap * target_count).ratio


def _target(sample: SeriesSample) -> ScrapeTarget:
    cluster, job, instance = (sample.labels.get(name, "") for name in TARGET_LABELS)
    return cluster, job, instance


def _owner(sample: SeriesSample, name: str) -> tuple[str | None, ...]:
    if name == "unattributed":
        return tuple(sample.labels.get(label, "") if label == "model" else None for label in OWNER_LABELS)
    return tuple(sample.labels.get(label, "") for label in OWNER_LABELS)


class Price(NamedTuple):
    """Price of an hour of one device whose model contains the pattern, without regard to case; all if it is empty."""

    pattern: str
    per_hour: float


def price_of(model: str, prices: Sequence[Price]) -> float | None:
    """Return the price of the longest pattern that matches."""
    matching = [each for each in prices if fnmatchcase(model.lower(), f"*{each.pattern.lower()}*")]
    return max(matching, key=lambda each: len(each.pattern)).per_hour if matching else None


class TeamRule(NamedTuple):
    """A team owns what matches: ``column`` is one of ``LABEL_BY_COLUMN``, ``pattern`` a pattern of its value."""

    team: str
    column: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use by one group. ``group``: its values in the order of the columns; None for unattributed memory.

    GiB-hours are those for which values are known, None if none are. ``mean_gibibytes``: mean over the period, if each
    machine's gaps were like the rest. ``coverage``: known part of the time of the machines on which the
    group was seen. Costs are None without the prices of all its models.
    """

    group: tuple[str | None, ...]
    used_gibibyte_hours: float
    idle_held_gibibyte_hours: float | None
    idle_and_reclaimable_gibibyte_hours: float | None
    wasted_gibibyte_hours: float | None
    mean_gibibytes: float
    coverage: float
    cost: float | None = None
    wasted_cost: float | None = None


def usage_by_group(
    accounts: Accounts,
    columns: Sequence[str],
    prices: Sequence[Price] = (),
    teams: Sequence[TeamRule] = (),
    extrapolate: bool = False,
) -> list[Usage]:
    """Return a row for each group, those with the highest use first. ``extrapolate``: measures include the gaps."""
    groups: defaultdict[tuple[str | None, ...], list[tuple[ScrapeTarget, str, Mapping[str, float]]]] = defaultdict(list)
    for (target, owner), measures in accounts.byte_seconds.items():
        labels: dict[str, str | None] = dict(zip((*OWNER_LABELS, *TARGET_LABELS), (*owner, *target), strict=True))
        labels |= {TEAM_COLUMN: _team(labels, teams), JOB_COLUMN: _job(labels)}
        group = tuple(labels[LABEL_BY_COLUMN.get(name, name)] for name in columns)
        groups[group].append((target, labels["model"] or "", measures))
    rows = [_group_usage(accounts, group, members, prices, extrapolate) for group, members in groups.items()]
    return sorted(rows, key=lambda row: (-row.used_gibibyte_hours, tuple(each or "" for each in row.group)))


def total_usage(accounts: Accounts, prices: Sequence[Price] = (), extrapolate: bool = False) -> Usage:
    """Return the use by all, whose coverage is that of all machines."""
    members = [
        (target, owner[OWNER_LABELS.index("model")] or "", each)
        for (target, owner), each in accounts.byte_seconds.items()
    ]
    return _group_usage(accounts, (), members, prices, extrapolate, accounts.coverage)


def _team(labels: Mapping[str, str | None], teams: Sequence[TeamRule]) -> str | None:
    if labels["user"] is None:
        return None
    return next(
        (rule.team for rule in teams if fnmatchcase(labels[LABEL_BY_COLUMN[rule.column]] or "", rule.pattern)), ""
    )


def _job(labels: Mapping[str, str | None]) -> str | None:
    """Return the job that the agent states, else that of Slurm's cgroup in the same form."""
    return labels["job_id"] or (f"slurm/{labels['slurm_job']}" if labels["slurm_job"] else labels["job_id"])


def _group_usage(
    accounts: Accounts,
    group: tuple[str | None, ...],
    members: Sequence[tuple[ScrapeTarget, str, Mapping[str, float]]],
    prices: Sequence[Price],
    extrapolate: bool,
    machines: Iterable[ScrapeTarget] | None = None,
) -> Usage:
    measures: dict[str, float] = {}
    costs: dict[str, float | None] = {"used": 0.0, "wasted": 0.0}
    extrapolated = 0.0
    for target, model, values in members:
        ratio = accounts.coverage[target].ratio if target in accounts.coverage else 1.0
        factor = 1 / ratio if ratio else 1.0
        extrapolated += values.get("used", 0.0) * factor
        hourly_price, device_bytes = price_of(model, prices), accounts.mean_device_bytes(model)
        for name, seconds in values.items():
            hours = seconds / 3600 * (factor if extrapolate else 1.0)
            measures[name] = measures.get(name, 0.0) + hours / GIB
            if name in costs:
                cost = costs[name]
                costs[name] = (
                    None
                    if cost is None or hourly_price is None or not device_bytes
                    else cost + hours / device_bytes * hourly_price
                )
    targets = {target for target, _, _ in members} if machines is None else {*machines}
    coverages = [each for target, each in accounts.coverage.items() if target in targets]
    known_seconds, expected_seconds = (
        sum(each.known_seconds for each in coverages),
        sum(each.expected_seconds for each in coverages),
    )
    return Usage(
        group=group,
        used_gibibyte_hours=measures.get("used", 0.0),
        idle_held_gibibyte_hours=measures.get("idle_held"),
        idle_and_reclaimable_gibibyte_hours=measures.get("idle_and_reclaimable"),
        wasted_gibibyte_hours=measures.get("wasted"),
        mean_gibibytes=extrapolated / accounts.period.seconds / GIB,
        coverage=Coverage(known_seconds, expected_seconds).ratio,
        cost=costs["used"] if prices else None,
        wasted_cost=costs["wasted"] if prices else None,
    )


def models_without_price(accounts: Accounts, prices: Sequence[Price]) -> list[str]:
    """Return the models without a price."""
    models = {owner[OWNER_LABELS.index("model")] or "" for _, owner in accounts.byte_seconds}
    return sorted(model for model in models if price_of(model, prices) is None)


def machines_with_gaps(accounts: Accounts) -> list[tuple[str, float]]:
    """Return the machines with gaps and their coverage, the lowest first."""
    return sorted(
        ((instance, each.ratio) for (_, _, instance), each in accounts.coverage.items() if each.ratio < 1),
        key=lambda gap: (gap[1], gap[0]),
    )
