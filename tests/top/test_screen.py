"""Heights of the parts of the screen."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpumond.top.screen import LEAST_TABLE, chart_rows, device_at, heights, remark_lines, remarks_in_full, scrolled
from gpumond.view.notices import FrameNotice
from gpumond.view.text import Span, plain_text

PARTS = ("devices", "estimate", "filter", "chart", "remarks")


@given(st.fixed_dictionaries({part: st.integers(0, 20) for part in PARTS}), st.integers(3, 80))
def test_parts_fill_the_screen_and_the_table_keeps_its_rows(wanted: dict[str, int], rows: int):
    found = heights(rows, wanted)
    assert all(0 <= found[part] <= wanted[part] for part in PARTS)
    if rows >= 3 + wanted["filter"] + 1 + LEAST_TABLE:
        assert sum(found.values()) == rows
        assert found["table"] >= LEAST_TABLE
    assert found["chart"] >= 2 or found["chart"] in (0, wanted["chart"])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"devices": 4, "estimate": 1, "filter": 0, "chart": 3, "remarks": 6}, (4, 1, 3, 6, 8)),
        ({"devices": 10, "estimate": 1, "filter": 0, "chart": 3, "remarks": 6}, (10, 1, 3, 2, 6)),
        ({"devices": 10, "estimate": 1, "filter": 1, "chart": 3, "remarks": 6}, (10, 0, 3, 2, 6)),
    ],
    ids=["one device", "eight devices", "eight devices and a filter"],
)
def test_parts_of_a_screen_of_24_rows(wanted: dict[str, int], expected: tuple[int, ...]):
    found = heights(22, wanted)
    assert tuple(found[part] for part in ("devices", "estimate", "chart", "remarks", "table")) == expected


def test_rows_of_the_table_precede_chart_and_notices():
    wanted = {"devices": 7, "estimate": 1, "filter": 0, "chart": 3, "remarks": 5}
    assert heights(22, wanted, 5)["table"] == 6
    assert heights(22, wanted, 7) == {**wanted, "remarks": 4, "table": 7}
    assert heights(22, wanted, 50)["table"] == 8, "not all of the screen"


@pytest.mark.parametrize(("rows", "free", "expected"), [(24, 12, 2), (60, 0, 9), (60, 20, 20), (60, 50, 30)])
def test_chart_takes_free_rows_of_a_large_screen(rows: int, free: int, expected: int):
    assert chart_rows(rows, free) == expected


def test_selected_device_is_scrolled_into_view():
    lines = [[Span(f"GPU {at}", "chosen" if at == 7 else "bold")] for at in range(10)]
    assert scrolled(lines, 4, 0, "GPU-7") == 4
    assert scrolled(lines, 4, 9, "GPU-7") == 6
    assert scrolled(lines, 20, 5, "GPU-7") == 0


def test_line_belongs_to_the_device_above():
    lines = [[Span("GPU 0", "bold")], [Span("####")], [Span("# live")], [Span("GPU 1", "chosen")], [Span("##")]]
    assert [device_at(lines, place) for place in range(5)] == [0, 0, 0, 1, 1]


def test_notices_are_complete_where_there_is_room():
    notices = [FrameNotice("warn", kind, f"{kind} " + 9 * "word ", kind) for kind in ("leak", "oom")]
    lines = [plain_text(line).rstrip() for line in remark_lines(notices, 40, 3)]
    assert lines == [
        "leak: leak word word word word word word",
        "word word word",
        "oom: oom word word word word word word …",
    ]
    assert len(remark_lines(notices, 40, 4)) == 4
    assert len(remark_lines(notices, 40, 2)) == 2


def test_notices_of_one_kind_take_one_line_and_are_complete_in_full():
    leaks = [FrameNotice("warn", "leak", f"pid {at} grows", "leak") for at in range(3)]
    other = FrameNotice("bad", "the daemon doesn't respond", "no response")
    lines = [plain_text(line) for line in remark_lines([other, *leaks], 80, 5)]
    assert lines == ["the daemon doesn't respond: no response", "leak (3): pid 0 grows, …"]
    assert [plain_text(line) for line in remark_lines([other, *leaks], 80, 1)] == ["4 more: press a"]
    full = [plain_text(line) for line in remarks_in_full([other, *leaks], 80)]
    assert [line for line in full if line] == [
        "the daemon doesn't respond: no response",
        *(f"leak: pid {at} grows" for at in range(3)),
    ]
