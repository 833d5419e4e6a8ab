"""Exposition compared with prometheus_client: parsed by its strict parsers, and line by line except for numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, isnan, nan

import pytest
from hypothesis import given, strategies as st
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumond.metrics.catalogue import Family, Row
from gpumond.metrics.exposition import FrameCollector, write

LABELS = ("workload", "gpu")
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
VALUES = st.one_of(st.booleans(), st.integers(0, 2**53), st.floats(0, allow_nan=False), st.none(), st.just(inf))
ROWS = st.lists(st.tuples(st.tuples(TEXTS, TEXTS), VALUES), max_size=8, unique_by=lambda row: row[0])
FAMILIES = (
    Family("gpumond_test_bytes", "gauge", 'A "gauge", of \\ two\nlines.', LABELS, lambda frame: ()),
    Family("gpumond_test_total", "counter", "A counter.", LABELS, lambda frame: ()),
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
    ours, theirs = write(family, rows, newer), by_library(family, rows, newer)
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
        line = write(family, [(("a", "0"), value)], False).splitlines()[-1]
        assert line == f'gpumond_test_bytes{{gpu="0",workload="a"}} {text}'
        (read,) = (s.value for f in parse_text(line + "\n") for s in f.samples)
        assert read == value or (isnan(read) and isnan(value))


def test_family_without_labels_has_no_braces():
    family = Family("gpumond_test_agents", "gauge", "Agents.", (), lambda frame: ())
    assert write(family, [((), 3)], True).splitlines()[-1] == "gpumond_test_agents 3"
