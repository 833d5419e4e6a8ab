"""Colors are distinguishable with each kind of color vision, and cover the shares of a ledger."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpumond.facts.shares import SHARES
from gpumond.view.text import COLORS, FREE_ON_DARK
from tests.helpers.color_vision import COLOR_VISION, MIN_DISTANCE, Matrix, distance


@pytest.mark.parametrize("free", [COLORS["free"], FREE_ON_DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eye", COLOR_VISION.values(), ids=list(COLOR_VISION))
def test_colors_are_distinguishable(eye: Matrix, free: str):
    colors = COLORS | {"free": free}
    near = {
        (one, other): round(distance(colors[one], colors[other], eye), 3)
        for one, other in combinations(colors, 2)
        if distance(colors[one], colors[other], eye) < MIN_DISTANCE
    }
    assert not near


def test_similar_greys_are_not_distinguishable():
    assert distance("#808080", "#8a8a8a", COLOR_VISION["all cones"]) < MIN_DISTANCE


def test_shares_and_free_memory_each_have_a_color():
    assert tuple(COLORS) == (*SHARES, "free")
