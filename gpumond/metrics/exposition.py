"""`/metrics`: the current Frame and the daemon's own counters, in Prometheus text or OpenMetrics.

A scrape with a thousand programs has 20,000 samples, and prometheus_client takes 8 us per sample. The families of a
frame are therefore rendered here; all others by the library. docs/contributing/decisions/008 has the figures, and the
tests compare every line with the library's.

Formats: prometheus.io/docs/instrumenting/exposition_formats, and OpenMetrics 1.0.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from math import isfinite, isnan
from typing import Literal, NamedTuple, get_args

from prometheus_client import exposition as prometheus_text
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from gpumond.facts.frame import Frame
from gpumond.facts.units import accepts
from gpumond.host.peer import person_uid
from gpumond.metrics import dcgm
from gpumond.metrics.catalog import FAMILIES, TOTAL, XID_ERRORS, Family, Row
from gpumond.metrics.dcgm import Compat
from gpumond.metrics.telemetry import Telemetry

GZIP_LEVEL, GZIP_FORMAT = 1, 31
MAX_SERIES = 50_000
"""Limit on the series of one frame. Above it, the user with the most series loses those of the last catalog
families."""


Group = Literal["device", "owner", "process", "daemon"]
"""Families of devices and the machine; of owners; of processes, workloads and cgroups; all others, with the daemon's
own counters.
"""
ALL_GROUPS: frozenset[Group] = frozenset(get_args(Group))


class Encoding(NamedTuple):
    """Exposition format that a scraper requests through its ``Accept`` header, and the groups of families.

    With ``compat``, a scrape contains only the devices under that exporter's names, and Xid errors as a counter.
    """

    openmetrics: bool
    compat: Compat | None = None
    groups: frozenset[Group] = ALL_GROUPS

    @classmethod
    def of(cls, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> Encoding:
        return cls(accepts(accept, "application/openmetrics-text"), compat, ALL_GROUPS if compat else groups)


class Scrape(NamedTuple):
    content_type: str
    plain: bytes
    compressed: bytes


class Exposition:
    """Renders each frame on the first scrape, once per format.

    With ``also``, a scrape includes the families of that exporter in addition to gpumond's own, from the next frame on.
    """

    def __init__(self, telemetry: Telemetry, also: Compat | None = None, max_series: int = MAX_SERIES) -> None:
        self._telemetry, self._max_series = telemetry, max_series
        self.also = also
        self._frame: Frame | None = None
        self._scrapes: dict[Encoding, Scrape] = {}

    def scrape(self, frame: Frame | None, form: Encoding) -> Scrape:
        """Return the scrape of a frame. Before the first frame, it contains only the daemon's counters."""
        if frame is not self._frame:
            self._frame, self._scrapes = frame, {}
        scrapes = self._scrapes  # a newer frame may replace it before this one is written
        if form not in scrapes:
            scrapes[form] = self._render(frame, form)
        return scrapes[form]

    def _render(self, frame: Frame | None, form: Encoding) -> Scrape:
        module = openmetrics if form.openmetrics else prometheus_text
        of_frame = b"" if frame is None else self._of_frame(frame, form).encode()  # it counts dropped series
        plain = of_frame + module.generate_latest(FrameCollector(partial(self._others, frame, form)))
        packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_FORMAT)
        return Scrape(module.CONTENT_TYPE_LATEST, plain, packer.compress(plain) + packer.flush())

    def _of_frame(self, frame: Frame, form: Encoding) -> str:
        """Write the families of the frame, at most ``max_series`` of its series."""
        catalog = (XID_ERRORS,) if form.compat else families_of(form.groups)
        series = [(family, [row for row in family.rows(frame) if row[1] is not None]) for family in catalog]
        if sum(len(rows) for _, rows in series) > self._max_series:
            limits = divide_series_limit(FAMILIES, frame, self._max_series)
            series = [(family, limits.cut(family, rows)) for family, rows in series]
            self._telemetry.series_dropped.inc(limits.dropped)
        if _labels.cache_info().currsize > 2 * sum(len(rows) for _, rows in series):
            _labels.cache_clear()  # most are those of ended programs
        return "".join([family_text(family, rows, form.openmetrics) for family, rows in series])

    def _others(self, frame: Frame | None, form: Encoding) -> Iterator[Metric]:
        """Yield the families that the library writes: those of another exporter, and the daemon's counters."""
        if frame is not None and (compat := form.compat or self.also) and "device" in form.groups:
            yield from dcgm.metrics(frame, compat)
        if form.compat is None and "daemon" in form.groups:
            yield from self._telemetry.registry.collect()


@cache
def families_of(groups: frozenset[Group]) -> tuple[Family, ...]:
    """Return the families of these groups in catalog order."""
    return tuple(family for family in FAMILIES if group_of(family) in groups)


def group_of(family: Family) -> Group:
    if family.name.startswith("gpumond_owner_"):
        return "owner"
    if {"pid", "workload", "cgroup"} & set(family.labels):
        return "process"
    return "device" if "uuid" in family.labels or family.name.startswith("gpumond_machine_") else "daemon"


class FrameCollector:
    """Collector for prometheus_client that returns the families of a frame, or a part of them."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> list[Metric]:
        return []


OwnerOf = Callable[[tuple[str, ...]], int | None]
"""Function from label values to the person that owns the series; None if there is no single owner."""


class SeriesLimits:
    """Number of series that each user may have in one scrape; ``dropped`` counts the series above it."""

    def __init__(self, owners: Mapping[str, OwnerOf], remaining: Mapping[int | None, int], dropped: int) -> None:
        self._owners, self._remaining, self.dropped = owners, dict(remaining), dropped

    def cut(self, family: Family, rows: Iterable[Row]) -> list[Row]:
        """Return the rows within their owners' limits. Call it for families in catalog order."""
        owner, remaining = self._owners[family.name], self._remaining
        kept: list[Row] = []
        for row in rows:
            uid = owner(row[0])
            if remaining[uid] > 0:
                remaining[uid] -= 1
                kept.append(row)
        return kept


def divide_series_limit(families: Iterable[Family], frame: Frame, most: int) -> SeriesLimits:
    """Count the series of each user and divide ``most`` among the users."""
    pids: dict[str, int | None] = {}
    workloads: dict[str, int | None] = {}
    for report in frame.snapshot.reports:
        person = person_uid(report.uid)
        for table, label in ((pids, str(report.pid)), (workloads, report.workload)):
            table[label] = person if table.get(label, person) == person else None
    owners: dict[str, OwnerOf] = {}
    counts: Counter[int | None] = Counter()
    for family in families:
        owner = owners[family.name] = _owner(family, pids, workloads)
        counts.update(owner(labels) for labels, value in family.rows(frame) if value is not None)
    remaining = max_min_fair_shares(counts, most)
    return SeriesLimits(owners, remaining, counts.total() - sum(remaining.values()))


def max_min_fair_shares(counts: Mapping[int | None, int], most: int) -> dict[int | None, int]:
    """Divide ``most`` by max-min fairness; series without an owner are served first."""
    remaining: dict[int | None, int] = {None: min(counts.get(None, 0), most)}
    room = most - remaining[None]
    users = sorted((count, uid) for uid, count in counts.items() if uid is not None)
    for number, (count, uid) in enumerate(users):
        remaining[uid] = min(count, room // (len(users) - number))
        room -= remaining[uid]
    return remaining


def _owner(family: Family, pids: Mapping[str, int | None], workloads: Mapping[str, int | None]) -> OwnerOf:
    for label, table in (("pid", pids), ("workload", workloads)):
        if label in family.labels:
            position = family.labels.index(label)
            return lambda labels, position=position, table=table: table.get(labels[position])  # type: ignore[misc]
    return lambda labels: None


LABEL_SETS = 16_384


def family_text(family: Family, rows: Iterable[Row], openmetrics: bool) -> str:
    """Return the family's HELP and TYPE lines, followed by its samples, if any."""
    return _header(family, openmetrics) + _samples(family, rows)


@lru_cache(1_024)
def _header(family: Family, openmetrics: bool) -> str:
    name = family.name.removesuffix(TOTAL) if openmetrics else family.name
    text = _escaped(family.help) if openmetrics else _escaped(family.help, quotes=False)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def _samples(family: Family, rows: Iterable[Row]) -> str:
    name, labels = family.name, family.labels
    return "".join(
        [
            f"{name}{_labels(labels, values)} {value if type(value) is int else _number(value)}\n"
            for values, value in rows
            if value is not None
        ]
    )


@lru_cache(LABEL_SETS)  # unchanged from frame to frame, and shared by all families of a pool
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escaped(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    """Format a value; integers stay integers, so bytes are exact."""
    if isfinite(value):
        return str(+value)  # True is 1
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
