from __future__ import annotations

import pytest

from gpumond.model.units import times


@pytest.mark.parametrize(("count", "words"), [(1, "once"), (2, "2 times"), (0, "0 times")])
def test_a_count_reads_as_people_say_it(count: int, words: str):
    assert times(count) == words
