"""Flushes by workload: predicted, held before and after, given back. Counters that outlive the programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter

from gpumond.model.pools import Outcome, Receipt

MAX_WORKLOADS = 100
"""That have series of their own. A new one takes the place of that known for longest of which no program is left."""

OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "planned")


class Workloads:
    def __init__(self, registry: CollectorRegistry, most: int = MAX_WORKLOADS) -> None:
        self._most = most
        self._known: dict[str, None] = {}
        self._connected: frozenset[str] = frozenset()
        self._flushes = Counter(
            "gpumond_workload_flushes",
            f"Receipts of a workload by outcome, plans excepted. Of {most} workloads at most, as are the next.",
            ["workload", "outcome"],
            registry=registry,
        )

        def of_bytes(name: str, help: str) -> Counter:
            return Counter(f"gpumond_workload_flush_{name}_bytes", help, ["workload"], registry=registry)

        self._expected = of_bytes("expected", "Memory that flushes of a workload had predicted to return.")
        self._released = of_bytes("released", "Memory that flushes of a workload returned, by the allocators' count.")
        self._before = of_bytes("before", "Memory that pools of a workload held when their flushes began, summed.")
        self._after = of_bytes("after", "Memory that the same pools held when their flushes were over, summed.")

    def connected(self, workloads: Iterable[str]) -> None:
        """Those of which a program is there. Their series begin at 0: a rate does not see a series' first value."""
        self._connected = frozenset(workloads)
        for workload in sorted(self._connected - self._known.keys()):
            self._admit(workload)

    def flushed(self, receipt: Receipt) -> None:
        """Of an outcome that is no plan."""
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
        for counter in self._of_bytes:
            counter.labels(workload)
        return True

    def _forget(self) -> bool:
        gone = next((workload for workload in self._known if workload not in self._connected), None)
        if gone is None:
            return False
        del self._known[gone]
        for outcome in OUTCOMES:
            self._flushes.remove(gone, outcome)
        for counter in self._of_bytes:
            counter.remove(gone)
        return True

    @property
    def _of_bytes(self) -> tuple[Counter, ...]:
        return self._expected, self._released, self._before, self._after
