"""Conversion of timestamps in logs to Unix seconds. Pure.

A time without a zone is taken as UTC on every machine, so the result depends on the file only.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from functools import lru_cache
from math import isfinite

MINUTE = 16
_ZONED = re.compile(r"([\d.,]+)\s*(?:(Z|z|UTC)|([+-])(\d\d):?(\d\d)?)?")
_MILLISECONDS = 1e11
"""Larger numbers are milli-, micro- or nanoseconds; as seconds this is the year 5138."""


def moment(text: str) -> float:
    """Parse ``2024/05/01 12:00:00.123``, ISO 8601 or a number of seconds. Raises ValueError with the remedy."""
    if text[4:5] not in ("/", "-") or text[:1] == "-":
        return _number(text)
    try:
        match = _ZONED.fullmatch(text, MINUTE + 1)
        if match is None or text[MINUTE] != ":":
            raise ValueError
        seconds = float(match[1].replace(",", "."))
        if not 0 <= seconds < 61:
            raise ValueError
        at = _minute(text[:MINUTE]) + seconds
        if match[3]:
            offset = 60 * int(match[4]) + int(match[5] or 0)
            at -= 60 * (offset if match[3] == "+" else -offset)
        return at
    except (ValueError, IndexError):
        raise ValueError(
            f"{text[:40]!r} is not a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds"
        ) from None


def day_and_time(at: float) -> str:
    """Format a time in UTC; as seconds if the log has no dates."""
    if at < 1e8:
        return f"{at:.0f} s"
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@lru_cache(maxsize=4096)
def _minute(text: str) -> float:
    year, month, day = int(text[:4]), int(text[5:7]), int(text[8:10])
    if text[7] not in "/-" or text[10] not in " T" or text[13] != ":":
        raise ValueError
    return datetime(year, month, day, int(text[11:13]), int(text[14:16]), tzinfo=timezone.utc).timestamp()


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{text[:40]!r} is not a time; expected 2024/05/01 12:00:00.123, ISO 8601 or seconds")
    scale = 1.0
    while value / scale > _MILLISECONDS:
        scale *= 1000
    return value if scale == 1 else round(value / scale, 6)
