"""Counters of flushes by workload: memory expected, held before and after, and released.

They persist after the programs have exited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from gpumond.model.pools import Outcome, Receipt

MAX_WORKLOADS = 100
"""Maximum number of workloads with their own series. A new workload replaces the oldest one without programs."""

OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "planned")


class Workloads:
    def __init__(self, registry: CollectorRegistry, most: int = MAX_WORKLOADS) -> None:
        self._most = most
        self._known: dict[str, None] = {}
        self._connected: frozenset[str] = frozenset()
        self._flushes = Counter(
            "gpumond_workload_flushes",
            f"Flush receipts of a workload by outcome, excluding plans. Limited to {most} workloads.",
            ["workload", "outcome"],
            registry=registry,
        )

        def bytes_counter(name: str, help: str) -> Counter:
            return Counter(f"gpumond_workload_flush_{name}_bytes", help, ["workload"], registry=registry)

        self._expected = bytes_counter("expected", "Memory that flushes of the workload were expected to release.")
        self._released = bytes_counter(
            "released", "Memory released by flushes of the workload, as counted by the allocators."
        )
        self._before = bytes_counter("before", "Memory held by pools of the workload when their flushes began, summed.")
        self._after = bytes_counter("after", "Memory held by the same pools when their flushes ended, summed.")

    def connected(self, workloads: Iterable[str]) -> None:
        """Set the workloads that have programs. Their series start at 0, because rate() ignores the first value."""
        self._connected = frozenset(workloads)
        for workload in sorted(self._connected - self._known.keys()):
            self._admit(workload)

    def flushed(self, receipt: Receipt) -> None:
        """Count a receipt whose outcome is not ``planned``."""
        workload = receipt.workload
        if workload not in self._known and not self._admit(workload):
            return
        self._flushes.labels(workload, receipt.outcome).inc()
        self._released.labels(workload).inc(max(0, receipt.released_bytes))
        if receipt.expected is not None:
            self._expected.labels(workload).inc(receipt.expected.likely)
        if receipt.before is not None and receipt.after is not None:
            self._before.labels(workload).inc(receipt.before.held_bytes)
            self._after.labels(workload).inc(receipt.after.held_bytes)

    def _admit(self, workload: str) -> bool:
        if len(self._known) >= self._most and not self._forget():
            return False
        self._known[workload] = None
        for outcome in OUTCOMES:
            self._flushes.labels(workload, outcome)
        for counter in self._bytes_counters:
            counter.labels(workload)
        return True

    def _forget(self) -> bool:
        stale = next((workload for workload in self._known if workload not in self._connected), None)
        if stale is None:
            return False
        del self._known[stale]
        for outcome in OUTCOMES:
            self._flushes.remove(stale, outcome)
        for counter in self._bytes_counters:
            counter.remove(stale)
        return True

    @property
    def _bytes_counters(self) -> tuple[Counter, ...]:
        return self._expected, self._released, self._before, self._after
