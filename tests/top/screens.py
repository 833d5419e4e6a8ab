"""Text of a screen, of an app without a terminal and of one in a real terminal."""

from __future__ import annotations

import html
import re
from typing import Any

from textual.app import App

_TEXT = re.compile(r'<text[^>]* x="([\d.]+)"[^>]* clip-path="url\(#[^)]*line-(\d+)\)">(.*?)</text>')


def lines(app: App[Any]) -> list[str]:
    """Return the lines from the top without styles; the space between pieces is not exact."""
    found: dict[int, list[tuple[float, str]]] = {}
    for x, line, text in _TEXT.findall(app.export_screenshot()):
        found.setdefault(int(line), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(found.get(at, []))) for at in range(max(found, default=-1) + 1)]


def text(app: App[Any]) -> str:
    return "\n".join(lines(app))


class Terminal:
    """A minimal terminal emulator: it supports cursor movement and writing."""

    _PARTS = re.compile(
        r"\x1b\[([0-9;?<>=]*)[ -/]*([@-~])|\x1b[P\]_^X].*?(?:\x1b\\|\x07)|\x1b[@-_a-z=>]|([^\x1b])", re.DOTALL
    )

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.at = (0, 0)

    def feed(self, written: str) -> None:
        for arguments, final, character in self._PARTS.findall(written):
            row, column = self.at
            if final in ("H", "f"):
                numbers = [int(number or 1) for number in f"{arguments};".split(";")]
                self.at = (numbers[0] - 1, numbers[1] - 1)
            elif character == "\r":
                self.at = (row, 0)
            elif character == "\n":
                self.at = (row + 1, column)
            elif character and character.isprintable():
                if row < self.rows and column < self.columns:
                    self.cells[row][column] = character
                self.at = (row, column + 1)

    def text(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.cells)
