"""Figures in documents are those of the result files; summaries and fits of benchmarks are correct."""

from __future__ import annotations

import pytest

from bench.tables import exponent, exponents, medians, peers_table, ratios, scaling_table, super_linear
from tools.docs.figures import Figure, outdated, wrapped


def test_figures_of_documents_are_those_of_the_result_files():
    assert [str(path) for path, _ in outdated()] == [], "run `make docs`"


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
    table, items = wrapped(text).split("\n\n")
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


def test_peer_without_a_measure_has_an_empty_cell():
    rounds = {"gpumond": [{"cpu_s": 1.0, "pss_mib": 60.0}], "peer": [{"cpu_s": 4.0}]}
    values = {name: medians(own) for name, own in rounds.items()}
    setting = {"values": values, "ratios": ratios(rounds)}
    figures = {"settings": {"8 devices": setting}, "rounds": 3, "minutes": 0.5, "absent": {"other": "not installed"}}
    assert peers_table(figures | {"versions": {"peer": "peer 1.0"}}).splitlines() == [
        "Medians of 3 rounds, CPU time over 30 s in each; peer 1.0. Not measured: other (not installed).",
        "",
        "| | gpumond | peer |",
        "|---|---:|---:|",
        "| **8 devices** | | |",
        "| CPU time, s a minute | 1.00 | 4.00 (0.25) |",
        "| memory (PSS), MiB | 60.0 |  |",
    ]


@pytest.mark.parametrize("k", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_exponent_of_growth_over_a_constant_is_fitted(k: float, constant: float):
    points = [(x, constant + 0.5 * x**k) for x in (0 if constant else 1, 5, 16, 50, 160, 500)]
    assert exponent(points) == pytest.approx(k, abs=0.051)


def test_value_that_hardly_changes_has_no_exponent():
    assert exponent([(1, 10.0), (10, 11.0), (100, 12.0)]) is None


def test_super_linear_sweeps_are_named():
    points = [{"x": x, "cpu_ms": 1.0 + x, "tick_ms": 0.1 * x**2, "pss_mib": 60.0} for x in (1.0, 4.0, 16.0, 64.0)]
    figures = {"sweeps": {"devices": {"points": points, "exponents": exponents(points)}}}
    assert super_linear(figures["sweeps"]) == ["devices: tick_ms 2.0"]
    assert scaling_table(figures).splitlines()[-1] == (
        "| devices: 1 to 64 | 2 → 65 (x^1.00) | 60 → 60 (constant) |  | 0.1 → 410 (x^2.00) |"
    )
