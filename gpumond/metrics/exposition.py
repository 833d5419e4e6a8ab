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

GZIP_LEVEL, GZIP_WINDOW_BITS = 1, 31
MAX_SERIES = 50_000
"""Limit on the series of one frame. Above it, the user with the most series loses those of the last catalog
families."""


Group = Literal["device", "owner", "process", "daemon"]
"""Families of devices and the machine; of owners; of processes, workloads and cgroups; all others, with the daemon's
own counters.
"""
ALL_GROUPS: frozenset[Group] = frozenset(get_args(Group))


class ScrapeFormat(NamedTuple):
    """Exposition format that a scraper requests through its ``Accept`` header, and the groups of families.

    With ``compat``, a scrape contains only the devices under that exporter's names, and Xid errors as a counter.
    """

    openmetrics: bool
    compat: Compat | None = None
    groups: frozenset[Group] = ALL_GROUPS

    @classmethod
    def of(cls, accept: str, compat: Compat | None = None, groups: frozenset[Group] = ALL_GROUPS) -> ScrapeFormat:
        return cls(accepts(accept, "application/openmetrics-text"), compat, ALL_GROUPS if compat else groups)


class Scrape(NamedTuple):
    content_type: str
    body: bytes
    gzip_body: bytes


class Exposition:
    """Renders each frame on the first scrape, once per format.

    A scrape includes the families of the ``additional`` exporter besides gpumond's own, from the next frame on.
    """

    def __init__(self, telemetry: Telemetry, additional: Compat | None = None, max_series: int = MAX_SERIES) -> None:
        self._telemetry, self._max_series = telemetry, max_series
        self.additional = additional
        self._frame: Frame | None = None
        self._scrapes: dict[ScrapeFormat, Scrape] = {}

    def scrape(self, frame: Frame | None, format: ScrapeFormat) -> Scrape:
        """Return the scrape of a frame. Before the first frame, it contains only the daemon's counters."""
        if frame is not self._frame:
            self._frame, self._scrapes = frame, {}
        scrapes = self._scrapes  # a newer frame may replace it before this one is written
        if format not in scrapes:
            scrapes[format] = self._render(frame, format)
        return scrapes[format]

    def _render(self, frame: Frame | None, format: ScrapeFormat) -> Scrape:
        module = openmetrics if format.openmetrics else prometheus_text
        frame_text = b"" if frame is None else self._frame_text(frame, format).encode()  # it counts dropped series
        body = frame_text + module.generate_latest(FrameCollector(partial(self._library_metrics, frame, format)))
        packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW_BITS)
        return Scrape(module.CONTENT_TYPE_LATEST, body, packer.compress(body) + packer.flush())

    def _frame_text(self, frame: Frame, format: ScrapeFormat) -> str:
        """Write the families of the frame, at most ``max_series`` of its series."""
        catalog = (XID_ERRORS,) if format.compat else families_in(format.groups)
        series = [(family, [row for row in family.rows(frame) if row[1] is not None]) for family in catalog]
        if sum(len(rows) for _, rows in series) > self._max_series:
            limits = divide_series_limit(FAMILIES, frame, self._max_series)
            series = [(family, limits.cut(family, rows)) for family, rows in series]
            self._telemetry.series_dropped.inc(limits.dropped)
        if _labels_text.cache_info().currsize > 2 * sum(len(rows) for _, rows in series):
            _labels_text.cache_clear()  # most are those of ended programs
        return "".join([family_text(family, rows, format.openmetrics) for family, rows in series])

    def _library_metrics(self, frame: Frame | None, format: ScrapeFormat) -> Iterator[Metric]:
        """Yield the families that the library writes: those of another exporter, and the daemon's counters."""
        if frame is not None and (compat := format.compat or self.additional) and "device" in format.groups:
            yield from dcgm.metrics(frame, compat)
        if format.compat is None and "daemon" in format.groups:
            yield from self._telemetry.registry.collect()


@cache
def families_in(groups: frozenset[Group]) -> tuple[Family, ...]:
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


UserOf = Callable[[tuple[str, ...]], int | None]
"""Function from label values to the uid of the person whose series it is; None if it isn't one person's."""


class SeriesLimits:
    """Number of series that each user may have in one scrape; ``dropped`` counts the series above it."""

    def __init__(self, users: Mapping[str, UserOf], remaining: Mapping[int | None, int], dropped: int) -> None:
        self._users, self._remaining, self.dropped = users, dict(remaining), dropped

    def cut(self, family: Family, rows: Iterable[Row]) -> list[Row]:
        """Return the rows within their users' limits. Call it for families in catalog order."""
        user_of, remaining = self._users[family.name], self._remaining
        allowed: list[Row] = []
        for row in rows:
            uid = user_of(row[0])
            if remaining[uid] > 0:
                remaining[uid] -= 1
                allowed.append(row)
        return allowed


def divide_series_limit(families: Iterable[Family], frame: Frame, max_series: int) -> SeriesLimits:
    """Count the series of each user and divide ``max_series`` among the users."""
    pids: dict[str, int | None] = {}
    workloads: dict[str, int | None] = {}
    for report in frame.snapshot.reports:
        user = person_uid(report.uid)
        for table, label in ((pids, str(report.pid)), (workloads, report.workload)):
            table[label] = user if table.get(label, user) == user else None
    users: dict[str, UserOf] = {}
    counts: Counter[int | None] = Counter()
    for family in families:
        user_of = users[family.name] = _user_function(family, pids, workloads)
        counts.update(user_of(labels) for labels, value in family.rows(frame) if value is not None)
    remaining = max_min_fair_shares(counts, max_series)
    return SeriesLimits(users, remaining, counts.total() - sum(remaining.values()))


def max_min_fair_shares(counts: Mapping[int | None, int], total: int) -> dict[int | None, int]:
    """Divide ``total`` by max-min fairness; series that aren't one user's are served first."""
    shares: dict[int | None, int] = {None: min(counts.get(None, 0), total)}
    available = total - shares[None]
    users = sorted((count, uid) for uid, count in counts.items() if uid is not None)
    for number, (count, uid) in enumerate(users):
        shares[uid] = min(count, available // (len(users) - number))
        available -= shares[uid]
    return shares


def _user_function(family: Family, pids: Mapping[str, int | None], workloads: Mapping[str, int | None]) -> UserOf:
    for label, table in (("pid", pids), ("workload", workloads)):
        if label in family.labels:
            position = family.labels.index(label)
            return lambda labels, position=position, table=table: table.get(labels[position])  # type: ignore[misc]
    return lambda labels: None


CACHED_LABEL_SETS = 16_384


def family_text(family: Family, rows: Iterable[Row], openmetrics: bool) -> str:
    """Return the family's HELP and TYPE lines, followed by its samples, if any."""
    return _header_text(family, openmetrics) + _samples_text(family, rows)


@lru_cache(1_024)
def _header_text(family: Family, openmetrics: bool) -> str:
    name = family.name.removesuffix(TOTAL) if openmetrics else family.name
    text = _escape(family.help) if openmetrics else _escape(family.help, escape_quotes=False)
    return f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n"


def _samples_text(family: Family, rows: Iterable[Row]) -> str:
    name, labels = family.name, family.labels
    return "".join(
        [
            f"{name}{_labels_text(labels, values)} {value if type(value) is int else _value_text(value)}\n"
            for values, value in rows
            if value is not None
        ]
    )


@lru_cache(CACHED_LABEL_SETS)  # unchanged from frame to frame, and shared by all families of a pool
def _labels_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escape(text: str, escape_quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if escape_quotes else text


def _value_text(value: float) -> str:
    """Format a value; integers stay integers, so bytes are exact."""
    if isfinite(value):
        return str(+value)  # True is 1
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
