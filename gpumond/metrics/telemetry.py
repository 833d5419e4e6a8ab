"""What the daemon did, as opposed to what it saw: ordinary counters that outlive the frames."""

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
    """The daemon's own counters, in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._standing: set[tuple[str, str, str | None]] = set()
        self._flushes = Counter("gpumond_flushes", "Receipts by outcome.", ["outcome"], registry=registry)
        self._released = Counter(
            "gpumond_flush_released_bytes", "Memory that flushes returned, by the allocators' count.", registry=registry
        )
        self._expected = Counter(
            "gpumond_flush_expected_bytes", "Memory that the same flushes had predicted.", registry=registry
        )
        self._flush_duration = Histogram(
            "gpumond_flush_duration_seconds",
            "From the request to the receipt of one pool.",
            buckets=FLUSH_BUCKETS,
            registry=registry,
        )
        self.workloads = Workloads(registry)
        self._reports = Counter("gpumond_agent_reports", "Reports taken from agents.", registry=registry)
        self._rejects = Counter(
            "gpumond_agent_rejects", "Agents' connections and frames refused.", ["reason"], registry=registry
        )
        self._http_rejects = Counter(
            "gpumond_http_rejects", "HTTP connections and requests refused.", ["reason"], registry=registry
        )
        self._log_dropped = Counter(
            "gpumond_log_dropped", "Log records left out, since there were too many of their kind.", registry=registry
        )
        self._restarts = Counter(
            "gpumond_collector_restarts", "Starts of the driver's process after the first.", registry=registry
        )
        self._faults = Counter(
            "gpumond_faults",
            "Facts that could not be read, each counted when it begins: one that lasts counts once.",
            ["source", "kind"],
            registry=registry,
        )
        self._events = Counter(
            "gpumond_events", "What happened, by kind, as /api/v1/events tells it.", ["kind"], registry=registry
        )
        self.tick_duration = Histogram(
            "gpumond_tick_duration_seconds",
            "One tick after the driver has answered: reports, attribution, verdicts, rules, the frame. "
            "The time of the driver's reading is not included.",
            buckets=TICK_BUCKETS,
            registry=registry,
        )
        self.ticks_skipped = Counter(
            "gpumond_ticks_skipped", "Ticks left out since the one before took too long.", registry=registry
        )
        for kind in get_args(Kind):  # from 0 on: a rate does not see a series' first value
            self._events.labels(kind)
        for outcome in get_args(Outcome):
            self._flushes.labels(outcome)
        self._notifications = Counter(
            "gpumond_notifications",
            "Messages sent to a receiver, failed ones included.",
            ["notifier"],
            registry=registry,
        )
        self._notifications_failed = Counter(
            "gpumond_notifications_failed", "Those that it did not take.", ["notifier", "reason"], registry=registry
        )
        self.store_writable = Gauge(
            "gpumond_store_writable", "1 while changes and alerts can be kept on disk, else 0.", registry=registry
        )
        self.series_dropped = Counter(
            "gpumond_series_dropped", "Series left out of a page since it would have had too many.", registry=registry
        )
        build = Gauge(
            "gpumond_build_info", "Version of the daemon and its Python.", ["version", "python"], registry=registry
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

    def faults(self, standing: Iterable[Fault], complete: bool = True) -> None:
        """Counts those that were not there before. After a reading that did not come none is known to be over."""
        now: set[tuple[str, str, str | None]] = {(fault.source, fault.kind, fault.device_uuid) for fault in standing}
        for source, kind, _ in now - self._standing:
            self._faults.labels(source, kind).inc()
        self._standing = now if complete else self._standing | now

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
