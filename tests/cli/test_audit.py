"""``gpumond audit``: the detail of an entry in a table."""

from __future__ import annotations

import pytest

from gpumond.cli.audit import COLUMNS, described


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ({"target": "all", "steps": ["cache"]}, 'target: all, steps: ["cache"]'),
        ({"name": "a\x1b[31mb\n"}, r"name: a\u001b[31mb\n"),
        ({}, ""),
        (None, "detail: null"),
    ],
)
def test_detail_is_shown_as_pairs_of_printable_text(detail: object, text: str):
    assert described(detail) == text


def test_long_detail_ends_with_a_whole_pair():
    text = described({f"key{number}": "x" * 30 for number in range(9)})
    assert text == f"key0: {'x' * 30}, key1: {'x' * 30}, …"
    assert len(described({"key": "x" * 500})) <= COLUMNS + 3
