"""Exposition compared with prometheus_client: parsed by its strict parsers, and line by line except for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, isnan, nan

import pytest
from hypothesis import given, strategies as st
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumond.facts.pools import ExpectedRelease, PoolBytes, Receipt
from gpumond.metrics.catalog import Family, Row
from gpumond.metrics.exposition import FrameCollector, family_text
from gpumond.metrics.telemetry import OUTCOMES, Telemetry, WorkloadFlushCounters
from gpumond.serve.examples import RECEIPT
from tests.helpers.agents import GIB

LABELS = ("workload", "gpu")
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
VALUES = st.one_of(st.booleans(), st.integers(0, 2**53), st.floats(0, allow_nan=False), st.none(), st.just(inf))
ROWS = st.lists(st.tuples(st.tuples(TEXTS, TEXTS), VALUES), max_size=8, unique_by=lambda row: row[0])
FAMILIES = (
    Family("gpumond_test_bytes", 'A "gauge", of \\ two\nlines.', LABELS, lambda frame: ()),
    Family("gpumond_test_total", "A counter.", LABELS, lambda frame: ()),
)


def by_library(family: Family, rows: Sequence[Row], newer: bool) -> str:
    make = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = make(family.name, family.help, labels=family.labels)
    for labels, value in rows:
        if value is not None:
            metric.add_metric(labels, value)
    module = openmetrics if newer else exposition
    text: str = module.generate_latest(FrameCollector(partial(iter, [metric]))).decode()
    return text.removesuffix("# EOF\n")


@pytest.mark.parametrize("newer", [False, True], ids=["text", "OpenMetrics"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
@given(rows=ROWS)
def test_exposition_equals_the_library(rows: list[Row], family: Family, newer: bool):
    ours, theirs = family_text(family, rows, newer), by_library(family, rows, newer)
    assert [line.rpartition(" ")[0] for line in ours.split("\n") if line[:1] != "#"] == [
        line.rpartition(" ")[0] for line in theirs.split("\n") if line[:1] != "#"
    ]
    assert [line for line in ours.split("\n") if line[:1] == "#"] == [
        line for line in theirs.split("\n") if line[:1] == "#"
    ]
    parse = parse_openmetrics if newer else parse_text
    end = "# EOF\n" if newer else ""
    read, expected = list(parse(ours + end)), list(parse(theirs + end))
    assert read == expected
    assert [s.value for f in read for s in f.samples] == [float(value) for _, value in rows if value is not None]


def test_non_finite_values_are_formatted_per_specification():
    family = FAMILIES[0]
    for value, text in ((nan, "NaN"), (inf, "+Inf"), (-inf, "-Inf")):
        line = family_text(family, [(("a", "0"), value)], False).splitlines()[-1]
        assert line == f'gpumond_test_bytes{{gpu="0",workload="a"}} {text}'
        (read,) = (s.value for f in parse_text(line + "\n") for s in f.samples)
        assert read == value or (isnan(read) and isnan(value))


def test_family_without_labels_has_no_braces():
    family = Family("gpumond_test_agents", "Agents.", (), lambda frame: ())
    assert family_text(family, [((), 3)], True).splitlines()[-1] == "gpumond_test_agents 3"


BEFORE, AFTER = PoolBytes(9 * GIB, 3 * GIB, 6 * GIB, None), PoolBytes(4 * GIB, 3 * GIB, GIB, None)


def make_receipt(**fields: object) -> Receipt:
    whole = replace(
        RECEIPT,
        workload="train",
        outcome="freed",
        expected=ExpectedRelease(5 * GIB, 6 * GIB, 7 * GIB),
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
    WorkloadFlushCounters(registry).set_connected(["train"])
    assert bytes_of(registry) == [0, 0, 0, 0]
    assert [count(registry, outcome) for outcome in OUTCOMES] == [0] * len(OUTCOMES)


def test_receipts_of_a_workload_are_summed_without_plans():
    telemetry = Telemetry()
    telemetry.add_receipt(make_receipt())
    telemetry.add_receipt(make_receipt(outcome="partial", released_bytes=2 * GIB))
    telemetry.add_receipt(make_receipt(outcome="planned"))
    assert bytes_of(telemetry.registry) == [12 * GIB, 7 * GIB, 18 * GIB, 8 * GIB]
    assert [count(telemetry.registry, outcome) for outcome in ("freed", "partial", "planned")] == [1, 1, None]


@pytest.mark.parametrize("missing", ["before", "after"])
def test_held_bytes_count_only_if_before_and_after_are_known(missing: str):
    registry = CollectorRegistry()
    WorkloadFlushCounters(registry).add_receipt(
        make_receipt(**{missing: None}, expected=None, outcome="failed", released_bytes=0)
    )
    assert bytes_of(registry) == [0, 0, 0, 0]
    assert count(registry, "failed") == 1


def test_released_bytes_are_never_counted_below_zero():
    registry = CollectorRegistry()
    WorkloadFlushCounters(registry).add_receipt(make_receipt(released_bytes=-GIB))
    assert bytes_of(registry)[1] == 0


def test_new_workload_replaces_a_stale_one_and_never_a_connected_one():
    registry = CollectorRegistry()
    workloads = WorkloadFlushCounters(registry, max_workloads=2)
    workloads.set_connected(["a", "b"])
    workloads.set_connected(["b"])
    workloads.set_connected(["b", "c"])
    assert [count(registry, "freed", name) for name in "abc"] == [None, 0, 0]
    assert bytes_of(registry, "a") == [None] * 4
    workloads.set_connected(["b", "c", "d"])
    workloads.add_receipt(make_receipt(workload="d"))
    assert [count(registry, "freed", name) for name in "bcd"] == [0, 0, None]


def test_returning_workload_starts_at_zero():
    registry = CollectorRegistry()
    workloads = WorkloadFlushCounters(registry, max_workloads=1)
    workloads.add_receipt(make_receipt(workload="a"))
    workloads.add_receipt(make_receipt(workload="b"))
    workloads.add_receipt(make_receipt(workload="a"))
    assert (count(registry, "freed", "a"), count(registry, "freed", "b")) == (1, None)
