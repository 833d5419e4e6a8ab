from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpumond.facts.shares import SHARES
from gpumond.view.text import COLORS, FILLS, GROUNDS, StackCell, bar, block, stack

PARTS = st.dictionaries(st.sampled_from((*SHARES, "reserved")), st.integers(0, 1 << 40))


@given(PARTS, st.integers(0, 1 << 41), st.integers(1, 300))
def test_borders_are_within_half_a_cell(parts: dict[str, int], size: int, width: int):
    cells = bar(parts, size, width)
    assert sum(count for _, count in cells) == width
    assert all(count > 0 for _, count in cells)
    whole = max(size, sum(parts.values()), 1)
    passed, drawn, counts = 0, 0, dict(cells)
    for part in (*SHARES, "reserved"):
        passed += parts.get(part, 0)
        drawn += counts.get(part, 0)
        assert abs(drawn - passed * width / whole) <= 0.5


def test_parts_are_in_the_order_of_the_shares_and_the_rest_is_free():
    assert bar({"reserved": 1, "cached": 2, "live": 4}, 10, 10) == [
        ("live", 4),
        ("cached", 2),
        ("reserved", 1),
        ("free", 3),
    ]


def test_overcount_does_not_exceed_the_bar():
    assert bar({"live": 30, "cached": 10}, 20, 8) == [("live", 6), ("cached", 2)]


def test_parts_have_distinct_marks_and_a_color():
    assert len(set(FILLS.values())) == len(FILLS) == len(set(GROUNDS.values()))
    assert FILLS.keys() == GROUNDS.keys() == COLORS.keys() | {"reserved"}
    assert all(mark.isascii() and len(mark) == 1 for mark in FILLS.values())


def outline(points: list[tuple[float, float]], end: float, width: int, rows: int) -> list[str]:
    drawn = stack([(at, {"live": int(value)}) for at, value in points], 0, end, width, rows)
    return ["".join(map(block, row)) for row in drawn]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], ["    ", "    "]),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], ["  ▄█", "▄███"]),
        ([(0, 4), (3, 4)], ["████", "████"]),
        ([(0, 4), (0.4, 8), (1, 0), (2, 8)], ["█ █ ", "█ █ "]),
        ([(0, 0), (1, 0)], ["    ", "    "]),
        ([(-5, 9), (9, 9), (1, 1)], [" █  ", " █  "]),
    ],
    ids=["nothing", "rising", "as often as it was read", "highest of an interval", "zero", "outside"],
)
def test_stack_shows_the_maximum_of_each_interval_from_zero(points: list[tuple[float, float]], expected: list[str]):
    assert outline(points, 4, 4, 2) == expected


def test_gap_in_the_history_remains_a_gap():
    points = [(float(at), 1.0) for at in (*range(5), *range(15, 20))]
    assert outline(points, 20, 20, 1) == ["█████          █████"]


def test_stack_shows_the_parts_from_the_bottom_in_their_proportion():
    parts = {"live": 8, "cached": 4, "overhead": 0, "unattributed": 4}
    top, bottom = stack([(0.0, parts)], 0, 1, 1, 2)
    assert bottom == [StackCell("live", "live", 8)]
    assert top == [StackCell("cached", "unattributed", 4)]


@given(st.lists(st.dictionaries(st.sampled_from(SHARES), st.integers(0, 1 << 40), min_size=1), min_size=1, max_size=20))
def test_height_of_a_stack_is_that_of_its_sum(points: list[dict[str, int]]):
    rows = stack([(float(at), parts) for at, parts in enumerate(points)], 0, len(points), len(points), 4)
    top = max(sum(parts.values()) for parts in points) or 1
    for column, parts in enumerate(points):
        total = sum(parts.values())
        height = sum(8 if row[column].upper else row[column].eighths for row in rows if row[column].lower)
        assert height == (max(1, round(total * 32 / top)) if total else 0)
