"""Logs that cannot be forged and cannot flood: one line each, escaped, at most so many of a kind a second."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

LogFormat = Literal["text", "json"]

PER_SECOND = 10
KINDS = 256
MAX_CHARACTERS = 8192
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RateLimitFilter(logging.Filter):
    """Lets ten records of a kind through each second. A kind is what was written in the program: its logger, its
    place and its level; what was filled in does not count.

    ``dropped`` is called for each record that is left out; the next of its kind says how many were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, per_second: int = PER_SECOND) -> None:
        super().__init__()
        self.dropped: Callable[[], None] = lambda: None
        self._clock, self._per_second = clock, per_second
        self._kinds: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, record.pathname, record.lineno), self._clock()
        began, count = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - began >= 1.0:
            left_out, began, count = max(0, count - self._per_second), now, 0
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.clear()
        self._kinds[kind] = began, count + 1
        if count >= self._per_second:
            self.dropped()
            return False
        record.left_out = left_out
        return True


class Text(logging.Formatter):
    """One line a record; a traceback follows, each line of it indented."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record)) + _note(record)

    def formatException(self, ei: object) -> str:
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        return _indented(stack_info)


class Json(logging.Formatter):
    """One JSON object a line: at (unix time), level, logger, message, and left_out and traceback where there are."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escaped(record.getMessage()),
        }
        if left_out := getattr(record, "left_out", 0):
            entry["left_out"] = left_out
        if record.exc_info:
            entry["traceback"] = [escaped(line) for line in self.formatException(record.exc_info).splitlines()]
        return json.dumps(entry)  # ASCII: what is not is escaped


def configure(how: LogFormat, level: int = logging.INFO) -> RateLimitFilter:
    """The program's logging, to standard error. What it returns counts what is left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if how == "json" else Text())
    bounded = RateLimitFilter()
    handler.addFilter(bounded)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about strangers' requests
    return bounded


def escaped(text: str) -> str:
    """Control characters, line ends and directions of text as ``\\x1b``, so that nobody can write a line of his own."""
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _indented(text: str) -> str:
    return "\n".join(f"    {escaped(line)}" for line in text.splitlines())


def _note(record: logging.LogRecord) -> str:
    left_out = getattr(record, "left_out", 0)
    return f" ({left_out} more of this kind were left out)" if left_out else ""
