"""Figures in documents are those of the result files; summaries and fits of benchmarks are correct."""

from __future__ import annotations

from string import Formatter

import pytest

from bench.tables import LINE_TITLES, medians, memory_ratio, peers_table, ratios
from tools.docs.figures import Figure, outdated_documents, wrap


def test_figures_of_documents_are_those_of_the_result_files():
    assert [str(path) for path, _ in outdated_documents()] == [], "run `make docs`"


def test_figure_has_keys_lists_units_and_formats():
    runs, by = [{"s": 1.0}, {"s": 4.0}, {}], {"a": {"n": 2}, "b": {"n": 3}}
    figures = Figure({"8x8": {"bytes": 3 << 20}, "runs": runs, "by": by})
    text = "{f[8x8][bytes].MiB:.1f} {f[runs][s][max]:.0f} {f[runs][count]} {f[by][each][n][sum]}"
    assert text.format(f=figures) == "3.0 4 3 5"


@pytest.mark.parametrize("field", ["{f[absent]}", "{f[a].furlongs}", "{f}"])
def test_figure_that_does_not_exist_is_refused(field: str):
    with pytest.raises((KeyError, TypeError)):
        field.format(f=Figure({"a": 1}))


def test_wrapped_text_keeps_tables_items_and_code():
    text = "| a | b |\n|---|---|\n\n- one\n  two\n- " + "word " * 22 + "`python -m bench.x`"
    table, items = wrap(text).split("\n\n")
    assert table == "| a | b |\n|---|---|"
    first, *others = items.splitlines()
    assert first == "- one two"
    assert others[-1].strip() == "`python -m bench.x`"
    assert len(others) == 2


def test_values_are_medians_and_ratios_are_paired():
    seconds = {"gpumond": (1.0, 4.0, 2.0), "peer": (2.0, 40.0, 4.0)}
    rounds = {name: [{"cpu_s": one} for one in own] for name, own in seconds.items()}
    assert medians(rounds["peer"]) == {"cpu_s": 4.0}
    assert ratios(rounds) == {"peer": {"cpu_s": 0.5}}


def test_comparison_has_the_values_of_each_peer_and_the_reason_for_each_that_is_absent():
    measures = {
        measure: 2.0 for line in LINE_TITLES.values() for _, measure, _, _ in Formatter().parse(line) if measure
    }
    rounds = {"gpumond": [measures], "peer": [measures | {"cpu_s": 4.0}]}
    values = {name: medians(own) for name, own in rounds.items()}
    figures = {"setting": "8 devices", "values": values, "ratios": ratios(rounds), "rounds": 3, "minutes": 0.5}
    caption, _, head, _, cpu, *_ = peers_table(
        figures | {"versions": {"peer": "peer 1.0"}, "absent": {"other": "not installed"}}
    ).splitlines()
    assert caption == (
        "The values are medians of 3 rounds. CPU time was measured for 30 s in each round. Versions: peer 1.0. "
        "Not measured: other (not installed)."
    )
    assert (head, cpu) == ("| 8 devices | gpumond | peer |", "| CPU time per minute, s | 2.00 | 4.00 |")


def test_memory_ratio_is_that_of_the_values_beside_it():
    values = {"gpumond": {"pss_mib": 64.2}, "nvitop-exporter": {"pss_mib": 30.4}}
    assert memory_ratio({"values": values, "ratios": {"nvitop-exporter": {"pss_mib": 2.4}}}) == "2.1"
