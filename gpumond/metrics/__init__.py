"""`/metrics`: the current Frame and the daemon's own counters, in Prometheus text or OpenMetrics."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from gpumond.metrics import dcgm
from gpumond.metrics.devices import XID_ERRORS
from gpumond.metrics.families import FAMILIES
from gpumond.metrics.family import Family
from gpumond.metrics.telemetry import Telemetry
from gpumond.model import Frame

GZIP_LEVEL = 1
MAX_SERIES = 50_000
"""Of one frame; those of the last families of the catalogue are left out first."""

Compat = Literal["dcgm"]


class Page(NamedTuple):
    content_type: str
    plain: bytes
    compressed: bytes


class Exposition:
    """Renders a frame when the first scrape asks for it, once for each format.

    With ``also`` the page has the families of that other exporter beside ours; it holds from the next frame on.
    """

    def __init__(self, telemetry: Telemetry, also: Compat | None = None, max_series: int = MAX_SERIES) -> None:
        self._telemetry, self._max_series = telemetry, max_series
        self.also = also
        self._frame: Frame | None = None
        self._pages: dict[tuple[bool, Compat | None], Page] = {}

    def page(self, frame: Frame | None, accept: str, compat: Compat | None = None) -> Page:
        """The page in the format that the ``Accept`` header asks for. Before the first frame: the counters alone.

        With ``compat`` the devices under that exporter's names and no others, XID errors as a counter excepted.
        """
        if frame is not self._frame:
            self._frame, self._pages = frame, {}
        key = ("application/openmetrics-text" in accept, compat)
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = self._render(frame, *key)
        return page

    def _render(self, frame: Frame | None, wants_openmetrics: bool, compat: Compat | None) -> Page:
        registry = CollectorRegistry()
        if frame is not None:
            ours = [own_metrics, dcgm.metrics] if self.also else [own_metrics]
            for metrics in [dcgm.metrics, xid_metrics] if compat else ours:
                registry.register(FrameCollector(partial(self._capped, metrics, frame)))
        if compat is None:
            registry.register(self._telemetry.registry)
        module = openmetrics if wants_openmetrics else exposition
        plain = module.generate_latest(registry)
        return Page(module.CONTENT_TYPE_LATEST, plain, gzip.compress(plain, GZIP_LEVEL, mtime=0))

    def _capped(self, metrics: Callable[[Frame], Iterable[Metric]], frame: Frame) -> Iterator[Metric]:
        left = self._max_series
        for metric in metrics(frame):
            self._telemetry.series_dropped.inc(max(0, len(metric.samples) - left))
            del metric.samples[left:]
            left -= len(metric.samples)
            yield metric


class FrameCollector:
    """A prometheus_client collector of one frame."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> list[Metric]:
        return []


def own_metrics(frame: Frame) -> Iterator[Metric]:
    for family in FAMILIES:
        yield to_metric(family, frame)


def xid_metrics(frame: Frame) -> Iterator[Metric]:
    """DCGM has the last one only."""
    yield to_metric(XID_ERRORS, frame)


def to_metric(family: Family, frame: Frame) -> Metric:
    make = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = make(family.name, family.help, labels=family.labels)
    for labels, value in family.rows(frame):
        if value is not None:
            metric.add_metric(labels, value)
    return metric
