from __future__ import annotations

import pytest

from gpumond.facts.units import counted, human


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [(1, "time", "1 time"), (2, "time", "2 times"), (0, "time", "0 times"), (2, "process", "2 processes")],
)
def test_counted_uses_the_plural_except_for_one(count: int, noun: str, words: str):
    assert counted(count, noun) == words


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (1023 << 30, "1023.0 GiB"),
        (9024 << 30, "8.8 TiB"),
        (-(1 << 30), "-1.0 GiB"),
    ],
)
def test_sizes_have_the_largest_unit_that_they_reach(size: int, text: str):
    assert human(size) == text
