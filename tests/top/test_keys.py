"""Input of a terminal as keys and mouse events."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpumond.facts.shares import SHARES
from gpumond.top.terminal import Mouse, decode
from gpumond.view.text import COLORS, FREE_ON_DARK
from tests.helpers.color_vision import COLOR_VISION, MIN_DISTANCE, Matrix, distance


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("sq", ["s", "q"]),
        ("\x1b[A\x1b[B\x1bOC\x1b[D", ["up", "down", "right", "left"]),
        ("\x1b[5~\x1b[6~\x1b[1~\x1b[F", ["pageup", "pagedown", "home", "end"]),
        ("\x1bOP\x1b[15~\x1b[20~\x1b[21~", ["f1", "f5", "f9", "f10"]),
        ("\r\x7f\x03\t", ["enter", "backspace", "ctrl-c", "tab"]),
        ("\x1bq", ["escape", "q"]),
        ("\x1b\x1b[A", ["escape", "up"]),
        ("ä€", ["ä", "€"]),
        ("\x1b[1;5A", ["up"]),
        ("\x1b[?64;1c\x1b[200~x", ["x"]),
        ("\x1b[<0;10;5M\x1b[<0;10;5m", [Mouse("press", 9, 4)]),
        ("\x1b[<64;1;1M\x1b[<65;1;1M\x1b[<2;1;1M", [Mouse("up", 0, 0), Mouse("down", 0, 0)]),
    ],
)
def test_input_is_decoded(text: str, keys: list[str | Mouse]):
    assert decode(text) == (keys, "")


@pytest.mark.parametrize("rest", ["\x1b", "\x1b[", "\x1b[<0;10", "\x1bO"])
def test_incomplete_sequence_is_kept(rest: str):
    assert decode(f"s{rest}") == (["s"], rest)


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
