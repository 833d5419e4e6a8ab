from __future__ import annotations

import pytest

from gpumond.model.units import counted


@pytest.mark.parametrize(("count", "words"), [(1, "1 time"), (2, "2 times"), (0, "0 times")])
def test_counted_uses_the_plural_except_for_one(count: int, words: str):
    assert counted(count, "time") == words
