"""Decoding of the input of a terminal: keys, and the mouse in SGR mode (1006). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple


class Mouse(NamedTuple):
    """``action``: press, up or down (of the wheel). Column and row count from 0."""

    action: str
    column: int
    row: int


_INPUT = re.compile(
    r"\x1b\[<(\d+);(\d+);(\d+)([Mm])"
    r"|\x1b\[([0-?]*)[ -/]*([@-~])"
    r"|\x1bO([@-~])"
    r"|(\x1b(?:\[[0-?]*[ -/]*|O)?\Z)"
    r"|(.)",
    re.DOTALL,
)
_BY_LETTER = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "Z": "shift-tab"}
_BY_LETTER |= {"P": "f1", "Q": "f2", "R": "f3", "S": "f4"}
_BY_NUMBER = {1: "home", 3: "delete", 4: "end", 5: "pageup", 6: "pagedown", 7: "home", 8: "end"}
_BY_NUMBER |= {11: "f1", 12: "f2", 13: "f3", 14: "f4", 15: "f5", 17: "f6", 18: "f7", 19: "f8", 20: "f9", 21: "f10"}
_BY_CHARACTER = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace", "\x1b": "escape"}
_BUTTONS = {0: "press", 64: "up", 65: "down"}


def decode(text: str) -> tuple[list[str | Mouse], str]:
    """Return the keys and mouse events of the input, and the incomplete sequence at its end.

    A key is a printable character or a name such as ``up``, ``escape`` and ``ctrl-c``. A sequence without a name here
    is ignored.
    """
    found: list[str | Mouse] = []
    for button, column, row, final, number, letter, letter3, rest, character in _INPUT.findall(text):
        if rest:
            return found, rest
        if button:
            action = _BUTTONS.get(int(button))
            if action and final == "M":
                found.append(Mouse(action, int(column) - 1, int(row) - 1))
        elif character:
            found.append(_named(character))
        elif name := _sequence(number, letter or letter3):
            found.append(name)
    return found, ""


def _named(character: str) -> str:
    if name := _BY_CHARACTER.get(character):
        return name
    return f"ctrl-{chr(ord(character) + 96)}" if character < " " else character


def _sequence(number: str, letter: str) -> str | None:
    first = number.partition(";")[0]
    if letter == "~":
        return _BY_NUMBER.get(int(first)) if first.isdecimal() else None
    return _BY_LETTER.get(letter)
