"""Counters of the daemon's own activity, which persist between frames."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gpumond import __version__
from gpumond.engine.events import Event, Kind
from gpumond.metrics.workloads import Workloads
from gpumond.model.pools import Outcome, Receipt
from gpumond.model.snapshot import Fault

TICK_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
FLUSH_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Telemetry:
    """Counters of the daemon in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._active: set[tuple[str, str, str | None]] = set()
        self._flushes = Counter("gpumond_flushes", "Flush receipts by outcome.", ["outcome"], registry=registry)
        self._released = Counter(
            "gpumond_flush_released_bytes",
            "Memory released by flushes, as counted by the allocators.",
            registry=registry,
        )
        self._expected = Counter(
            "gpumond_flush_expected_bytes", "Memory that flushes were expected to release.", registry=registry
        )
        self._flush_duration = Histogram(
            "gpumond_flush_duration_seconds",
            "Time from a flush request to the receipt of one pool.",
            buckets=FLUSH_BUCKETS,
            registry=registry,
        )
        self.workloads = Workloads(registry)
        self._reports = Counter("gpumond_agent_reports", "Reports accepted from agents.", registry=registry)
        self._rejects = Counter(
            "gpumond_agent_rejects",
            "Agent connections and messages rejected, by reason.",
            ["reason"],
            registry=registry,
        )
        self._http_rejects = Counter(
            "gpumond_http_rejects", "HTTP connections and requests rejected, by reason.", ["reason"], registry=registry
        )
        self._log_dropped = Counter("gpumond_log_dropped", "Log records dropped by the rate limit.", registry=registry)
        self._restarts = Counter("gpumond_collector_restarts", "Restarts of the collector process.", registry=registry)
        self._faults = Counter(
            "gpumond_faults",
            "Read failures, each counted once when it starts.",
            ["source", "kind"],
            registry=registry,
        )
        self._events = Counter(
            "gpumond_events", "Events by kind, as listed by /api/v1/events.", ["kind"], registry=registry
        )
        self.tick_duration = Histogram(
            "gpumond_tick_duration_seconds",
            "Processing time of a tick: reports, attribution, verdicts, rules and the frame. "
            "The driver reading is not included.",
            buckets=TICK_BUCKETS,
            registry=registry,
        )
        self.ticks_skipped = Counter(
            "gpumond_ticks_skipped", "Ticks skipped because the previous tick took too long.", registry=registry
        )
        for kind in get_args(Kind):  # starts at 0: rate() ignores the first value of a series
            self._events.labels(kind)
        for outcome in get_args(Outcome):
            self._flushes.labels(outcome)
        self._notifications = Counter(
            "gpumond_notifications",
            "Notifications sent to a receiver, including failed ones.",
            ["notifier"],
            registry=registry,
        )
        self._notifications_failed = Counter(
            "gpumond_notifications_failed",
            "Notifications that could not be delivered, by reason.",
            ["notifier", "reason"],
            registry=registry,
        )
        self.store_writable = Gauge(
            "gpumond_store_writable", "1 while changes and alerts can be written to disk, else 0.", registry=registry
        )
        self.series_dropped = Counter(
            "gpumond_series_dropped", "Series dropped by the limit of a page.", registry=registry
        )
        build = Gauge(
            "gpumond_build_info",
            "Versions of the daemon and of its Python interpreter.",
            ["version", "python"],
            registry=registry,
        )
        build.labels(__version__, platform.python_version()).set(1)

    def reported(self, count: int) -> None:
        self._reports.inc(count)

    def rejected(self, reason: str) -> None:
        self._rejects.labels(reason).inc()

    def http_rejected(self, reason: str) -> None:
        self._http_rejects.labels(reason).inc()

    def log_dropped(self) -> None:
        self._log_dropped.inc()

    def restarted(self) -> None:
        self._restarts.inc()

    def notified(self, notifier: str) -> None:
        self._notifications.labels(notifier).inc()

    def not_notified(self, notifier: str, reason: str) -> None:
        self._notifications_failed.labels(notifier, reason).inc()

    def faults(self, active: Iterable[Fault], complete: bool = True) -> None:
        """Count the faults that have started. After an incomplete reading, no fault is considered over."""
        now: set[tuple[str, str, str | None]] = {(fault.source, fault.kind, fault.device_uuid) for fault in active}
        for source, kind, _ in now - self._active:
            self._faults.labels(source, kind).inc()
        self._active = now if complete else self._active | now

    def happened(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.labels(event.kind).inc()

    def flushed(self, receipt: Receipt) -> None:
        self._flushes.labels(receipt.outcome).inc()
        if receipt.outcome == "planned":
            return
        self.workloads.flushed(receipt)
        self._flush_duration.observe(receipt.duration_seconds)
        self._released.inc(max(0, receipt.released_bytes))
        if receipt.expected is not None:
            self._expected.inc(receipt.expected.likely)
