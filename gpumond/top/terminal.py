"""The terminal: raw input, size, and the lines that are shown. Its previous state is restored at the end."""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NamedTuple

ESCAPE_SECONDS = 0.05
"""Time after which an escape character without a successor is the key."""

# the alternate screen; the cursor is hidden; the mouse is reported, in SGR form
BEGIN = "\x1b[?1049h\x1b[?25l\x1b[?1000h\x1b[?1006h\x1b[2J"
END = "\x1b[?1006l\x1b[?1000l\x1b[0m\x1b[?25h\x1b[?1049l"


class Terminal:
    """A context manager for standard input and output. SIGTERM and SIGHUP raise SystemExit in it."""

    def __init__(self) -> None:
        self._keyboard, self._screen = sys.stdin.fileno(), sys.stdout.fileno()
        self._encoding = sys.stdout.encoding or "ascii"
        self._before: list[Any] = []
        self._shown: list[str] = []
        self._size = (0, 0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._waker, False)

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._keyboard)
        tty.setraw(self._keyboard, termios.TCSANOW)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGWINCH, _resized)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        self._write(BEGIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._write(END)
        with suppress(termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._before)

    def can_show(self, text: str) -> bool:
        """Return whether the encoding of the terminal contains the characters."""
        try:
            text.encode(self._encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def size(self) -> tuple[int, int]:
        """Return columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self._screen)
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def wake(self) -> None:
        """End a wait in ``keys``. May be called in any thread."""
        with suppress(OSError):  # a full pipe wakes it, too
            os.write(self._waker, b"\0")

    def keys(self, seconds: float) -> list[str | Mouse]:
        """Return the keys and mouse events of the next ``seconds``; earlier, if there are any or at a call of ``wake``.

        Raises SystemExit when the terminal is closed.
        """
        limit = ESCAPE_SECONDS if self._rest else max(0.0, seconds)
        ready, _, _ = select.select([self._keyboard, self._awake], [], [], limit)
        if self._awake in ready:
            with suppress(BlockingIOError):
                os.read(self._awake, 4096)
        if self._keyboard in ready:
            self._rest += self._decoder.decode(self._read())
            found, self._rest = decode(self._rest)
            return found
        if self._rest and not ready:
            self._rest = ""
            return ["escape"]
        return []

    def _read(self) -> bytes:
        try:
            read = os.read(self._keyboard, 4096)
        except OSError:
            read = b""
        if not read:
            raise SystemExit(1)
        return read

    def draw(self, lines: Sequence[str]) -> None:
        """Show the lines from the top. Only lines that differ from those shown are written."""
        size = self.size()
        if size != self._size:
            self._size, self._shown = size, []
            self._write("\x1b[2J")
        before = [*self._shown, *[""] * (len(lines) - len(self._shown))]
        after = [*lines, *[""] * (len(before) - len(lines))]
        changed = [
            f"\x1b[{row};1H\x1b[K{line}"
            for row, (line, old) in enumerate(zip(after, before, strict=True), 1)
            if line != old
        ]
        if changed:
            self._write("".join(changed))
        self._shown = [*lines]

    def _write(self, text: str) -> None:
        rest = text.encode(self._encoding, "similar")
        while rest:
            rest = rest[os.write(self._screen, rest) :]


def _resized(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal itself ends the wait in ``keys``."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


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
    code = number.partition(";")[0]
    if letter == "~":
        return _BY_NUMBER.get(int(code)) if code.isdecimal() else None
    return _BY_LETTER.get(letter)
