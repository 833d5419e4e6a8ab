"""Numbered lines of a log from a file or standard input, optionally gzip, in UTF-8 or UTF-16."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from gpumond.facts.errors import ConfigError

MAX_LINE = 16 * 1024**2
GZIP = b"\x1f\x8b"


class Lines:
    """The lines of a log, read once. ``number`` is the number of the current line, from 1.

    A last line without a newline may be incomplete: ``whole`` is False for it.
    """

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self.name = name
        self.number = 0
        self.whole = True
        self.cut_short = False
        self._held: list[str] = []
        buffered = _buffered(stream)
        if buffered.peek(2)[:2] == GZIP:
            buffered = _buffered(cast("BinaryIO", gzip.GzipFile(fileobj=buffered)))
        self._buffered = buffered
        self._text: io.TextIOWrapper | None = None

    def first(self) -> str:
        """Return the first line that is not blank without consuming it; empty without one."""
        for line in self._held:
            if line.strip():
                return line
        while line := self._read():
            self._held.append(line)
            if line.strip() or len(self._held) > 1000:
                return line.strip("\n")
        return ""

    def __iter__(self) -> Iterator[str]:
        """Yield every line that is not blank, without its newline."""
        while line := (self._held.pop(0) if self._held else self._read()):
            self.number += 1
            self.whole = line.endswith("\n")
            if not self.whole and len(line) >= MAX_LINE:
                raise ConfigError(
                    f"{self.name}, line {self.number}: longer than {MAX_LINE} characters; check that the file is a log"
                )
            if line := line.strip("\r\n\0 "):
                yield line

    def remaining_text(self, limit: int) -> str:
        """Return the unread rest. Raises ConfigError if it is longer than ``limit`` characters."""
        held, self._held = "".join(self._held), []
        text = held + self._read(limit + 1)
        if len(text) > limit:
            raise ConfigError(
                f"{self.name}: more than {limit // 1024**2} MiB in one document; query a longer step or fewer series"
            )
        return text

    def _read(self, limit: int | None = None) -> str:
        try:
            if self._text is None:
                self._text = io.TextIOWrapper(self._buffered, encoding=self._encoding(), errors="replace", newline=None)
            return self._text.readline(MAX_LINE) if limit is None else self._text.read(limit)
        except EOFError:
            self.cut_short = True
            return ""
        except (OSError, zlib.error) as error:
            raise ConfigError(f"{self.name}, line {self.number + 1}: cannot be read: {error}") from None

    def _encoding(self) -> str:
        start = self._buffered.peek(3)[:3]
        return "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def open_lines(path: str) -> Lines:
    """Open a log; ``-`` is standard input. Raises ConfigError."""
    if path == "-":
        return Lines("standard input", sys.stdin.buffer)
    try:
        return Lines(path, open(path, "rb"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _buffered(stream: BinaryIO) -> io.BufferedReader:
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast("io.RawIOBase", stream))
