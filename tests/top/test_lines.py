"""Width and escape sequences of lines, and tables of text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpumond.view.text import (
    Span,
    ansi,
    cells,
    clipped,
    colors_of,
    cut,
    fitted,
    plain_text,
    table_lines as table,
    width_of,
    wrapped,
)

LINES = st.lists(st.builds(Span, st.text(st.sampled_from("ab 漢…é"), max_size=12)), max_size=5)


@given(LINES, st.integers(1, 40))
def test_clipped_line_is_at_most_as_long_as_the_width(line: list[Span], width: int):
    short = clipped(line, width)
    assert width_of(short) <= width
    if width_of(line) <= width:
        assert short == line
    else:
        assert plain_text(short).endswith("…")


@given(LINES, st.integers(2, 40))
def test_wrapped_lines_contain_all_words(line: list[Span], width: int):
    lines = wrapped(line, width)
    assert all(width_of(each) <= 2 * width for each in lines)  # a cell of a cut word may be wide
    text = "".join(piece.text for each in lines for piece in each)
    assert text.replace(" ", "") == "".join(piece.text for piece in line).replace(" ", "")


@given(st.lists(st.text("ab,", min_size=1, max_size=5), max_size=9), st.integers(5, 20))
def test_wrapped_lines_fit_without_a_space_at_the_end(words: list[str], width: int):
    lines = wrapped([Span(" ".join(words))], width)
    assert all(width_of(each) <= width for each in lines)


@given(st.text(st.sampled_from("ab漢é…"), max_size=12), st.integers(2, 20), st.booleans())
def test_fitted_text_has_the_width(text: str, width: int, right: bool):
    assert cells(fitted(text, width, right)) == width


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("漢字", 4, "漢字"), ("漢字x", 4, "漢…"), ("e\u0301", 1, "e\u0301")],
)
def test_cut_counts_columns(text: str, width: int, expected: str):
    assert cut(text, width) == expected


def test_styles_and_colors_of_a_line():
    line = [Span("a"), Span("b", "bold"), Span("c", ground="live"), Span("d", ground="live", ink="cached")]
    assert ansi(line, "none") == "a\x1b[1mb\x1b[0mcd"
    assert ansi(line, "true").endswith("\x1b[48;2;51;81;253mc\x1b[0m\x1b[48;2;51;81;253;38;2;45;165;149md\x1b[0m")
    assert "48;5;" in ansi(line, "256")


@pytest.mark.parametrize(
    ("environ", "colors"),
    [
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, "true"),
        ({"TERM": "xterm", "COLORTERM": "24bit"}, "true"),
        ({"TERM": "xterm"}, "none"),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "none"),
        ({}, "none"),
    ],
)
def test_environment_states_the_colors(environ: dict[str, str], colors: str):
    assert colors_of(environ) == colors


def test_table_shortens_text_and_keeps_numbers():
    header, rows = (">PID", "PROGRAM", ">USED", "VERDICT"), [("123456", "x" * 40, "10.0 GiB", "fragmentation")]
    assert max(map(len, table(header, rows))) == 6 + 40 + 8 + 13 + 6
    narrow = table(header, rows, 50)
    assert max(map(len, narrow)) == 50
    assert "123456" in narrow[1]
    assert "10.0 GiB" in narrow[1]
    assert "…" in narrow[1]
    least = table(header, rows, 10)
    assert max(map(len, least)) == 6 + 12 + 8 + 12 + 6
