"""`/metrics`: the current Frame and the daemon's own counters, in Prometheus text or OpenMetrics."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from gpumond.metrics.families import FAMILIES, Family
from gpumond.metrics.telemetry import Telemetry
from gpumond.model import Frame

GZIP_LEVEL = 1


class Page(NamedTuple):
    content_type: str
    plain: bytes
    compressed: bytes


class Exposition:
    """Renders a frame when the first scrape asks for it, once for each format."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._frame: Frame | None = None
        self._pages: dict[bool, Page] = {}

    def page(self, frame: Frame | None, accept: str) -> Page:
        """The page in the format that the ``Accept`` header asks for. Before the first frame: the counters alone."""
        if frame is not self._frame:
            self._frame, self._pages = frame, {}
        wants_openmetrics = "application/openmetrics-text" in accept
        page = self._pages.get(wants_openmetrics)
        if page is None:
            page = self._pages[wants_openmetrics] = self._render(frame, wants_openmetrics)
        return page

    def _render(self, frame: Frame | None, wants_openmetrics: bool) -> Page:
        registry = CollectorRegistry()
        if frame is not None:
            registry.register(FrameCollector(frame))
        registry.register(self._telemetry.registry)
        module = openmetrics if wants_openmetrics else exposition
        plain = module.generate_latest(registry)
        return Page(module.CONTENT_TYPE_LATEST, plain, gzip.compress(plain, GZIP_LEVEL, mtime=0))


class FrameCollector:
    """A prometheus_client collector of one frame."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            yield to_metric(family, self._frame)


def to_metric(family: Family, frame: Frame) -> Metric:
    make = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = make(family.name, family.help, labels=family.labels)
    for labels, value in family.rows(frame):
        if value is not None:
            metric.add_metric(labels, value)
    return metric
