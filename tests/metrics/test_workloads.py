"""Counters of flushes by workload, and the limit of workloads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from gpumond.facts.pools import Expected, PoolBytes, Receipt
from gpumond.metrics.telemetry import OUTCOMES, Telemetry, Workloads
from gpumond.serve.examples import RECEIPT
from tests.helpers.agents import GIB

BEFORE, AFTER = PoolBytes(9 * GIB, 3 * GIB, 6 * GIB, None), PoolBytes(4 * GIB, 3 * GIB, GIB, None)


def make_receipt(**fields: object) -> Receipt:
    whole = replace(
        RECEIPT,
        workload="train",
        outcome="freed",
        expected=Expected(5 * GIB, 6 * GIB, 7 * GIB),
        released_bytes=5 * GIB,
        before=BEFORE,
        after=AFTER,
    )
    return replace(whole, **fields)  # type: ignore[arg-type]


def bytes_of(registry: CollectorRegistry, workload: str = "train") -> list[float | None]:
    names = (f"gpumond_workload_flush_{part}_bytes_total" for part in ("expected", "released", "before", "after"))
    return [registry.get_sample_value(name, {"workload": workload}) for name in names]


def count(registry: CollectorRegistry, outcome: str, workload: str = "train") -> float | None:
    labels = {"workload": workload, "outcome": outcome}
    return registry.get_sample_value("gpumond_workload_flushes_total", labels)


def test_connected_workload_begins_at_zero():
    registry = CollectorRegistry()
    Workloads(registry).connected(["train"])
    assert bytes_of(registry) == [0, 0, 0, 0]
    assert [count(registry, outcome) for outcome in OUTCOMES] == [0] * len(OUTCOMES)


def test_receipts_of_a_workload_are_summed_without_plans():
    telemetry = Telemetry()
    telemetry.flushed(make_receipt())
    telemetry.flushed(make_receipt(outcome="partial", released_bytes=2 * GIB))
    telemetry.flushed(make_receipt(outcome="planned"))
    assert bytes_of(telemetry.registry) == [12 * GIB, 7 * GIB, 18 * GIB, 8 * GIB]
    assert [count(telemetry.registry, outcome) for outcome in ("freed", "partial", "planned")] == [1, 1, None]


@pytest.mark.parametrize("missing", ["before", "after"])
def test_held_bytes_count_only_if_before_and_after_are_known(missing: str):
    registry = CollectorRegistry()
    Workloads(registry).flushed(make_receipt(**{missing: None}, expected=None, outcome="failed", released_bytes=0))
    assert bytes_of(registry) == [0, 0, 0, 0]
    assert count(registry, "failed") == 1


def test_released_bytes_are_never_counted_below_zero():
    registry = CollectorRegistry()
    Workloads(registry).flushed(make_receipt(released_bytes=-GIB))
    assert bytes_of(registry)[1] == 0


def test_new_workload_replaces_a_stale_one_and_never_a_connected_one():
    registry = CollectorRegistry()
    workloads = Workloads(registry, most=2)
    workloads.connected(["a", "b"])
    workloads.connected(["b"])
    workloads.connected(["b", "c"])
    assert [count(registry, "freed", name) for name in "abc"] == [None, 0, 0]
    assert bytes_of(registry, "a") == [None] * 4
    workloads.connected(["b", "c", "d"])
    workloads.flushed(make_receipt(workload="d"))
    assert [count(registry, "freed", name) for name in "bcd"] == [0, 0, None]


def test_returning_workload_starts_at_zero():
    registry = CollectorRegistry()
    workloads = Workloads(registry, most=1)
    workloads.flushed(make_receipt(workload="a"))
    workloads.flushed(make_receipt(workload="b"))
    workloads.flushed(make_receipt(workload="a"))
    assert (count(registry, "freed", "a"), count(registry, "freed", "b")) == (1, None)
