"""Counters of the daemon's own activity, which persist between frames."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from gpumond import __version__, revision
from gpumond.events import Event, EventKind
from gpumond.facts.frame import SilenceState
from gpumond.facts.pools import FlushOutcome, Receipt
from gpumond.facts.snapshot import Fault
from gpumond.quantities.device_quantities import STORE_WRITABLE

MAX_WORKLOADS = 100
"""Maximum number of workloads with their own series. A new workload replaces the oldest one without programs."""

OUTCOMES = tuple(outcome for outcome in get_args(FlushOutcome) if outcome != "planned")


class WorkloadFlushCounters:
    """Counters of flushes by workload, which persist after the programs have exited."""

    def __init__(self, registry: CollectorRegistry, max_workloads: int = MAX_WORKLOADS) -> None:
        self._max_workloads = max_workloads
        self._workloads: dict[str, None] = {}
        self._connected: frozenset[str] = frozenset()
        self._flushes = Counter(
            "gpumond_workload_flushes",
            f"Flush receipts of a workload by outcome, excluding dry runs. Limited to {max_workloads} workloads.",
            ["workload", "outcome"],
            registry=registry,
        )

        def bytes_counter(name: str, help: str) -> Counter:
            return Counter(f"gpumond_workload_flush_{name}_bytes", help, ["workload"], registry=registry)

        self._expected = bytes_counter(
            "expected", "Memory that flushes of the workload were expected to release, if that could be predicted."
        )
        self._released = bytes_counter(
            "released", "Memory released by flushes of the workload, as counted by the allocators."
        )
        self._before = bytes_counter(
            "before",
            "Held memory before flushes, summed over receipts that contain the values before and after the flush.",
        )
        self._after = bytes_counter(
            "after",
            "Held memory after flushes, summed over receipts that contain the values before and after the flush.",
        )

    def set_connected(self, workloads: Iterable[str]) -> None:
        """Set the workloads that have programs. Their series start at 0, because rate() ignores the first value."""
        self._connected = frozenset(workloads)
        for workload in sorted(self._connected - self._workloads.keys()):
            self._add(workload)

    def add_receipt(self, receipt: Receipt) -> None:
        """Count a receipt whose outcome is not ``planned``."""
        workload = receipt.workload
        if workload not in self._workloads and not self._add(workload):
            return
        self._flushes.labels(workload, receipt.outcome).inc()
        self._released.labels(workload).inc(max(0, receipt.released_bytes))
        if receipt.expected is not None and receipt.expected.likely is not None:
            self._expected.labels(workload).inc(receipt.expected.likely)
        if receipt.before is not None and receipt.after is not None:
            self._before.labels(workload).inc(receipt.before.held_bytes)
            self._after.labels(workload).inc(receipt.after.held_bytes)

    def _add(self, workload: str) -> bool:
        if len(self._workloads) >= self._max_workloads and not self._remove_oldest():
            return False
        self._workloads[workload] = None
        for outcome in OUTCOMES:
            self._flushes.labels(workload, outcome)
        for counter in self._bytes_counters:
            counter.labels(workload)
        return True

    def _remove_oldest(self) -> bool:
        stale = next((workload for workload in self._workloads if workload not in self._connected), None)
        if stale is None:
            return False
        del self._workloads[stale]
        for outcome in OUTCOMES:
            self._flushes.remove(stale, outcome)
        for counter in self._bytes_counters:
            counter.remove(stale)
        return True

    @property
    def _bytes_counters(self) -> tuple[Counter, ...]:
        return self._expected, self._released, self._before, self._after


NO_PID = -1
"""A pid of no process: its metrics are absent."""
TICK_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
FLUSH_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Telemetry:
    """Counters of the daemon in a registry of their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._active_faults: set[tuple[str, str, str | None]] = set()
        self._flushes = counter("gpumond_flushes", "Flush receipts by outcome, including dry runs.", ["outcome"])
        self._released = counter(
            "gpumond_flush_released_bytes", "Memory released by flushes, as counted by the allocators."
        )
        self._expected = counter(
            "gpumond_flush_expected_bytes", "Memory that flushes were expected to release, if that could be predicted."
        )
        self._flush_duration = histogram(
            "gpumond_flush_duration_seconds",
            "Time from a flush request to the receipt of one pool.",
            buckets=FLUSH_BUCKETS,
        )
        self.workloads = WorkloadFlushCounters(registry)
        self.count_report = counter("gpumond_agent_reports", "Reports accepted from agents.").inc
        self._rejected = counter(
            "gpumond_agent_connections_rejected", "Agent connections and messages rejected, by reason.", ["reason"]
        )
        self._http_rejected = counter(
            "gpumond_http_rejected", "HTTP connections and requests rejected, by reason.", ["reason"]
        )
        self.count_dropped_log_line = counter("gpumond_log_dropped", "Log lines dropped by the rate limit.").inc
        self.count_driver_restart = counter("gpumond_collector_restarts", "Restarts of the driver process.").inc
        self._faults = counter("gpumond_faults", "Faults, each counted once when it starts.", ["source", "kind"])
        self._events = counter("gpumond_events", "Events by kind, as listed by /api/v1/events.", ["kind"])
        self.tick_duration = histogram(
            "gpumond_tick_duration_seconds",
            "Duration of a tick, excluding the time spent reading the driver.",
            buckets=TICK_BUCKETS,
        )
        self.ticks_skipped = counter("gpumond_ticks_skipped", "Ticks skipped because the previous tick took too long.")
        for kind in get_args(EventKind):  # starts at 0: rate() ignores the first value of a series
            self._events.labels(kind)
        for outcome in get_args(FlushOutcome):
            self._flushes.labels(outcome)
        self._notifications = counter(
            "gpumond_notifications",
            "Attempts to send a notification to a receiver, including failed ones.",
            ["receiver"],
        )
        self._notifications_failed = counter(
            "gpumond_notifications_failed",
            "Failed attempts to send a notification, by reason; queue_full: how often the queue became full.",
            ["receiver", "reason"],
        )
        self.store_writable = gauge(f"gpumond_{STORE_WRITABLE.family_name}", STORE_WRITABLE.help)
        self._silences = gauge("gpumond_silences", "Silences that haven't ended, by state.", ["state"])
        self.count_silences(())
        self.series_dropped = counter("gpumond_series_dropped", "Series dropped because a scrape reached its limit.")
        self._config_hashes = "", ""
        self._reload_successful = gauge(
            "gpumond_config_last_reload_successful",
            "1 if the last start or reload could load the configuration file, else 0.",
        )
        self._reload_success_time = gauge(
            "gpumond_config_last_reload_success_timestamp_seconds",
            "Unix time at which the configuration file was last loaded.",
        )
        self._config_info = gauge(
            "gpumond_config_info",
            "Hashes of the settings (without addresses and directories) and of the rules in effect.",
            ["hash", "rules_hash"],
        )
        build = gauge(
            "gpumond_build_info",
            "The daemon's version, commit (empty if unknown) and Python version.",
            ["version", "revision", "python"],
        )
        build.labels(__version__, revision(), platform.python_version()).set(1)

    def add_processes(self, driver_process_pid: Callable[[], int | None]) -> None:
        """Add `python_info`, `process_*` of this process, and `gpumond_collector_process_*` of the collector's."""
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        ProcessCollector(
            namespace="gpumond_collector", pid=lambda: driver_process_pid() or NO_PID, registry=self.registry
        )

    def set_configuration_loaded(self) -> None:
        self._reload_successful.set(1)
        self._reload_success_time.set_to_current_time()

    def set_config_hashes(self, settings_hash: str, rules_hash: str) -> None:
        """Replace the hashes of the settings and of the rules in effect."""
        if (settings_hash, rules_hash) != self._config_hashes:
            self._config_hashes = settings_hash, rules_hash
            self._config_info.clear()
            self._config_info.labels(settings_hash, rules_hash).set(1)

    def set_configuration_failed(self, loaded_at: float | None = None) -> None:
        """``loaded_at``: when the settings in effect were loaded, unless by this process."""
        self._reload_successful.set(0)
        if loaded_at is not None:
            self._reload_success_time.set(loaded_at)

    def count_rejection(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def count_http_rejection(self, reason: str) -> None:
        self._http_rejected.labels(reason).inc()

    def count_notification(self, receiver: str) -> None:
        self._notifications.labels(receiver).inc()

    def count_failed_notification(self, receiver: str, reason: str) -> None:
        self._notifications_failed.labels(receiver, reason).inc()

    def count_silences(self, states: Iterable[SilenceState]) -> None:
        """Set the number of silences from the states of all that have not ended."""
        current = list(states)
        for state in ("pending", "active"):
            self._silences.labels(state).set(current.count(state))

    def count_faults(self, active: Iterable[Fault], is_complete: bool = True) -> None:
        """Count the faults that have started. After an incomplete reading, no fault is considered over."""
        faults: set[tuple[str, str, str | None]] = {(fault.source, fault.kind, fault.device_uuid) for fault in active}
        for source, kind, _ in faults - self._active_faults:
            self._faults.labels(source, kind).inc()
        self._active_faults = faults if is_complete else self._active_faults | faults

    def count_events(self, events: Iterable[Event]) -> None:
        for event in events:
            self._events.labels(event.kind).inc()

    def add_receipt(self, receipt: Receipt) -> None:
        self._flushes.labels(receipt.outcome).inc()
        if receipt.outcome == "planned":
            return
        self.workloads.add_receipt(receipt)
        self._flush_duration.observe(receipt.duration_seconds)
        self._released.inc(max(0, receipt.released_bytes))
        if receipt.expected is not None and receipt.expected.likely is not None:
            self._expected.inc(receipt.expected.likely)
