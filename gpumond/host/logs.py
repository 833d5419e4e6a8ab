"""Log formatting and rate limiting: one escaped line per record, a limited number per second of each kind."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

MAX_PER_SECOND = 10
MAX_KINDS = 256
UNLIMITED_LOGGER = "gpumond.store.audit"
"""Logger of the audit entries' digests: a dropped one couldn't be verified. Requests of users are limited."""
MAX_CHARACTERS = 8192
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TEXT_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (.*)")
"""The beginning of a record, which a collector may have prefixed."""


class RateLimitFilter(logging.Filter):
    """Passes ten records of each kind per second, and all of the audit.

    The kind of a record is its logger and its source position; the arguments do not count. ``dropped`` is called for
    each dropped record, and the next record of that kind states how many were dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.dropped: Callable[[], None] = lambda: None
        self._clock = clock
        self._kinds: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == UNLIMITED_LOGGER:
            return True
        kind, now = (record.name, record.pathname, record.lineno), self._clock()
        started, count = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - started >= 1.0:
            left_out, started, count = max(0, count - MAX_PER_SECOND), now, 0
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = started, count + 1
        if count >= MAX_PER_SECOND:
            self.dropped()
            return False
        record.left_out = left_out
        return True


class TextFormatter(logging.Formatter):
    """Formats one line per record, followed by the indented lines of a traceback."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_text(super().formatMessage(record)) + _dropped_note(record)

    def formatException(self, ei: object) -> str:
        return _indent(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        return _indent(stack_info)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line.

    Keys: at (Unix time), level, logger, message, and left_out and traceback if present.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_text(record.getMessage()),
        }
        if left_out := getattr(record, "left_out", 0):
            entry["left_out"] = left_out
        if record.exc_info:
            entry["traceback"] = [escape_text(line) for line in self.formatException(record.exc_info).splitlines()]
        return json.dumps(entry)  # ASCII: other characters are escaped


def configure_logging(log_format: LogFormat, log_level: LogLevel = "info") -> RateLimitFilter:
    """Configure logging to standard error. Returns the filter that counts dropped records."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    rate_limit = RateLimitFilter()
    handler.addFilter(rate_limit)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are about clients' requests
    return rate_limit


def source_and_message(line: str) -> tuple[str, str]:
    """Return the logger and the message of a line of the log, which may have the prefix of a collector; empty strings
    for another line. A message that quotes a line doesn't count as that line.
    """
    if text := TEXT_RECORD.search(line):
        source, _, message = text[1].partition(" ")[2].partition(": ")
        return source, message
    try:
        entry = json.loads(line[line.index("{") :])
        return str(entry["logger"]), str(entry["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def escape_text(text: str) -> str:
    """Escape control characters, line ends and text directions as ``\\x1b``, so log lines cannot be forged."""
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _indent(text: str) -> str:
    return "\n".join(f"    {escape_text(line)}" for line in text.splitlines())


def _dropped_note(record: logging.LogRecord) -> str:
    left_out = getattr(record, "left_out", 0)
    return f" ({left_out} similar records dropped)" if left_out else ""
