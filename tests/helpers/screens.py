"""A command in a terminal of its own, and the text on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.helpers import forks

TOP = [sys.executable, "-m", "gpumond", "top"]
KEYS = {"up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "enter": "\r", "escape": "\x1b"}
KEYS |= {"backspace": "\x7f", "end": "\x1b[F", "f1": "\x1bOP", "f5": "\x1b[15~"}


class Terminal:
    """A minimal terminal emulator: it supports cursor movement, erasure and writing."""

    _PARTS = re.compile(
        r"\x1b\[([0-9;?<>=]*)[ -/]*([@-~])|\x1b[P\]_^X].*?(?:\x1b\\|\x07)|\x1b[@-_a-z=>]|([^\x1b])", re.DOTALL
    )
    _INCOMPLETE = re.compile(r"\x1b(?:\[[0-9;?<>= -/]*)?\Z")

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.at = (0, 0)
        self.rest = ""

    def feed(self, written: str) -> None:
        written = self.rest + written
        rest = self._INCOMPLETE.search(written)
        self.rest = rest[0] if rest else ""
        for arguments, final, character in self._PARTS.findall(written[: len(written) - len(self.rest)]):
            row, column = self.at
            if final in ("H", "f"):
                numbers = [int(number or 1) for number in f"{arguments};".split(";")]
                self.at = (numbers[0] - 1, numbers[1] - 1)
            elif final == "K" and row < self.rows:
                self.cells[row][column:] = [" "] * (self.columns - column)
            elif final == "J":
                self.cells = [[" "] * self.columns for _ in range(self.rows)]
            elif character == "\r":
                self.at = (row, 0)
            elif character == "\n":
                self.at = (row + 1, column)
            elif character and character.isprintable():
                if row < self.rows and column < self.columns:
                    self.cells[row][column] = character
                self.at = (row, column + 1)

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]

    def text(self) -> str:
        return "\n".join(self.lines())


class Session:
    """Command in a terminal of its own."""

    def __init__(self, command: list[str], size: tuple[int, int], **environ: str) -> None:
        self.keyboard, self.terminal = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(self.terminal)
        self.written = ""
        self._readable = select.poll()  # not select.select, which refuses descriptors above 1,023
        self._readable.register(self.keyboard, select.POLLIN)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")
        }
        self.process = forks.start(
            command,
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | environ,
            start_new_session=True,
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen = Terminal(columns, rows)

    def read(self) -> None:
        """Read until nothing has been written for some time."""
        while self.read_once():
            pass

    def read_once(self, seconds: float = 0.05) -> bool:
        """Read what is written within the next ``seconds``. Returns whether there was any."""
        if not self._readable.poll(1000 * seconds):
            return False
        written = self._decoder.decode(os.read(self.keyboard, 65536))
        self.written += written
        self.screen.feed(written)
        return True

    def shows(self, *words: str, without: str = "\0") -> str:
        """Wait until the screen contains all words, and return its text. A line break between two words is a space."""

        def is_shown(screen: str) -> bool:
            searched = screen + "\0" + " ".join(screen.split())
            return all(word in searched for word in words) and without not in screen

        return self.until(is_shown, str(words))

    def until(self, condition: Callable[[str], bool], expected: str = "the condition") -> str:
        end = time.monotonic() + 30
        while True:
            self.read()
            screen = self.screen.text()
            if condition(screen):
                return screen
            assert self.process.poll() is None, f"the command has ended:\n{self.written[-3000:]}"
            assert time.monotonic() < end, f"{expected} did not come:\n{screen}\n{self.written[-2000:]!r}"

    def press(self, *keys: str) -> None:
        """Press keys by their names; other texts are typed as they are."""
        for key in keys:
            os.write(self.keyboard, KEYS.get(key, key).encode())

    def click(self, column: int, row: int, button: int = 0) -> None:
        os.write(self.keyboard, f"\x1b[<{button};{column + 1};{row + 1}M".encode())

    def ends(self, seconds: float = 20.0) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < end, "it does not end"
        self.read()
        return self.process.returncode


@contextmanager
def terminal(command: list[str], size: tuple[int, int] = (80, 24), **environ: str) -> Iterator[Session]:
    session = Session(command, size, **environ)
    try:
        yield session
    finally:
        if session.process.poll() is None:
            session.process.kill()
            session.process.wait()
        os.close(session.keyboard)
        os.close(session.terminal)


@contextmanager
def top(*urls: str, size: tuple[int, int] = (80, 24), **environ: str) -> Iterator[Session]:
    """Run ``gpumond top`` without colors, and without columns that were chosen before."""
    options = [word for url in urls for word in ("--url", url)]
    with terminal([*TOP, *options], size, **{"NO_COLOR": "1", "XDG_STATE_HOME": os.devnull, **environ}) as session:
        yield session
