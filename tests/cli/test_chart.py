"""Chart of a series: bounded, with its peaks and gaps, and readable without Unicode."""

from __future__ import annotations

import pytest

from gpumond.view.text import ASCII_BLOCKS, BLOCKS, CHART_COLUMNS, CHART_INTERVALS, CHART_WIDTH, ChartCurve, draw_chart


def curve(*values: float | None, every: float = 1.0) -> ChartCurve:
    made = ChartCurve()
    for number, value in enumerate(values):
        if value is not None:
            made.add(number * every, value)
    return made


@pytest.mark.parametrize("count", [1, 5, CHART_COLUMNS, CHART_INTERVALS, 3 * CHART_INTERVALS + 1, 20_000])
@pytest.mark.parametrize("every", [0.1, 1.0, 60.0])
def test_chart_width_does_not_depend_on_series_length(count: int, every: float):
    lines = draw_chart(curve(*[5.0] * count, every=every), 10.0, blocks=BLOCKS)
    assert max(map(len, lines)) <= CHART_WIDTH
    assert min(map(len, lines)) < CHART_WIDTH


def test_short_peak_in_a_long_series_is_visible():
    values = [1.0] * 50_000
    values[31_000] = 9.0
    columns = curve(*values).columns()
    assert (max(v for v in columns if v is not None), columns.count(9.0)) == (9.0, 1)


def test_rising_series_rises_from_end_to_end():
    columns = [value for value in curve(*map(float, range(1000))).columns() if value is not None]
    assert (len(columns), columns, columns[-1]) == (CHART_COLUMNS, sorted(columns), 999.0)


def test_gap_is_blank():
    values: list[float | None] = [8.0] * 100 + [None] * 100 + [8.0] * 100
    bottom = draw_chart(curve(*values), 8.0, blocks=BLOCKS)[3]
    third = CHART_COLUMNS // 3
    assert bottom[-third // 2] == bottom[-CHART_COLUMNS + third // 2] == BLOCKS[8]
    assert bottom[-CHART_COLUMNS // 2] == " "


def test_full_half_and_zero_values_have_their_heights():
    lines = draw_chart(curve(0.0, 5.0, 10.0), 10.0, blocks=BLOCKS)
    assert [line[-1] for line in lines] == [BLOCKS[8]] * 4
    assert lines[3][-CHART_COLUMNS] == BLOCKS[1]


def test_marks_are_below_their_time():
    lines = draw_chart(curve(*[1.0] * 100), 1.0, marks=(0.0, 99.0), blocks=ASCII_BLOCKS)
    assert lines[4] == " " * (CHART_WIDTH - CHART_COLUMNS) + "^" + " " * (CHART_COLUMNS - 2) + "^"


def test_ascii_chart_has_ascii_characters_only():
    assert "".join(draw_chart(curve(*map(float, range(100))), 99.0, blocks=ASCII_BLOCKS)).isascii()
