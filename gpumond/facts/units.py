"""Durations, thresholds and sizes in readable form: ``90s``, ``80%``, ``1GiB``. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from time import gmtime, strftime

MIB, GIB = 1 << 20, 1 << 30
MINUTE_SECONDS, HOUR_SECONDS, DAY_SECONDS = 60.0, 3600.0, 86400.0

_DURATION = re.compile(r"\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS: dict[str | None, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_AMOUNT = re.compile(r"(-?\d+(?:\.\d+)?)\s*(%|B|[KMGT]iB|[kMGT]B)?")
_FACTORS: dict[str | None, float] = {
    "B": 1,
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGT")},
    None: 1,
}


def parse_seconds(value: object) -> float:
    """Convert a number or a text such as ``1.5s``, ``5m``, ``1h30m`` to seconds. Raises ValueError."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("expected a duration such as 30s, 5m or 1h")
    return _finite(sum(float(number) * _SECONDS[unit or None] for number, unit in _PART.findall(match[0])))


def parse_threshold(value: object) -> float:
    """Convert ``0.8``, ``80%`` (0.8) or ``1GiB`` (bytes) to a number. Raises ValueError."""
    match = _AMOUNT.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("expected a number, a percentage such as 80% or a size such as 1GiB")
    number = float(match[1])
    return _finite(number / 100 if match[2] == "%" else number * _FACTORS[match[2]])


def parse_size(value: object) -> int:
    """Convert ``80GiB``, ``512MiB`` or a number of bytes to bytes. Raises ValueError."""
    match = _AMOUNT.fullmatch(str(value).strip())
    if match is None or match[2] == "%" or isinstance(value, bool):
        raise ValueError("expected a size such as 80GiB (the units are B, KiB to TiB and kB to TB)")
    return int(_finite(float(match[1]) * _FACTORS[match[2]]))


def parse_size_argument(text: str) -> int:
    """Convert a size that a user types, which has a unit unless it is 0. Raises ValueError."""
    size = parse_size(text)
    if size and (number := text.strip()).replace(".", "", 1).isdecimal():
        raise ValueError(f"expected a unit, as in {number}GiB")
    return size


def parse_seconds_argument(text: str) -> float:
    """Convert a duration that a user types, which has a unit unless it is 0. Raises ValueError."""
    duration = parse_seconds(text)
    if duration and (number := text.strip()).replace(".", "", 1).isdecimal():
        raise ValueError(f"expected a unit, as in {number}s, {number}m or {number}h")
    return duration


def _finite(number: float) -> float:
    if not abs(number) < 1 << 63:
        raise ValueError("expected a smaller number")
    return number


def duration_text(seconds: float) -> str:
    """Format seconds, rounded to the nearest unit: ``42 s``, ``1 min 39 s``, ``23 min``, ``2 h 5 min``, ``3 d``.

    Two units below ten minutes and from an hour on; a second unit of zero is omitted.
    """
    rounded = int(seconds + 0.5)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 600:
        return _two_units(rounded, "min", 60, "s")
    minutes = int(seconds / 60 + 0.5)
    if minutes < 60:
        return f"{minutes} min"
    return (
        _two_units(minutes, "h", 60, "min") if minutes < 1440 else _two_units(int(seconds / 3600 + 0.5), "d", 24, "h")
    )


def rough_duration_text(seconds: float) -> str:
    """Format a time that is known roughly: ``less than 1 min``, ``about 7 min``, ``about 2 h``, ``about 3 d``."""
    if seconds < 60:
        return "less than 1 min"
    minutes = seconds / 60
    if minutes < 90:
        return f"about {round(minutes) if minutes < 20 else 5 * round(minutes / 5)} min"
    return f"about {round(minutes / 60)} h" if minutes < 2880 else f"about {round(minutes / 1440)} d"


def _two_units(count: int, unit: str, size: int, smaller_unit: str) -> str:
    remainder = count % size
    return f"{count // size} {unit}" + (f" {remainder} {smaller_unit}" if remainder else "")


def clock_text(at: float, now: float | None = None) -> str:
    """Return the time of day (UTC), with its date if that isn't the date of ``now``."""
    date = "" if now is None or at // DAY_SECONDS == now // DAY_SECONDS else "%Y-%m-%d "
    return strftime(f"{date}%H:%M:%S UTC", gmtime(at))


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, whose plural is regular: ``1 time``, ``3 times``, ``2 processes``."""
    ending = "es" if noun.endswith(("s", "sh")) else "s"
    return f"{count} {noun}{'' if count == 1 else ending}"


def list_text(names: Sequence[str]) -> str:
    """Return names as a part of a sentence: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


CALLER_NAMES = {"SIGCONT": "the program's user (SIGCONT)", "exit": "the program's end"}
"""Callers whose names people would not know."""


_LOCAL_CALLER = re.compile(r"(?:(token[^/@]*)[^@]*@)?uid:(\d+)(?:/[^@]*)?")
"""A caller on the daemon's machine: token and uid; with a slash for a browser."""


def caller_text(name: str, requested_for: str = "", user_name: Callable[[int], str | None] = lambda uid: None) -> str:
    """Return who caused an action, for people: gpumond itself, if a program of ``name`` waited for memory.

    ``user_name`` returns the name of a uid, if it is known: ``root``, ``root (token)`` or ``root (token, browser)``.
    """
    caller = CALLER_NAMES.get(name, name)
    if (local := _LOCAL_CALLER.fullmatch(name)) and (user := user_name(int(local[2]))):
        details = [local[1], "browser" if "/" in name else None]
        caller = f"{user} ({', '.join(filter(None, details))})" if any(details) else user
    return f"gpumond for {requested_for}, requested by {caller}" if requested_for else caller


NEXT_UNIT_FROM = 999.95
"""Number from which on the next unit is used: rounded, it has four digits."""


def size_text(size: float) -> str:
    """Format bytes: ``31.2 GiB``, ``1.5 TiB``. The number has at most three digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (999.5 if unit == "B" else NEXT_UNIT_FROM):
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def distinct_size_texts(size: int, other: int) -> tuple[str, str]:
    """Format two sizes whose difference the reader sees as `size_text` formats it: with another digit if the rounded
    sizes differ by another number.
    """
    text, other_text = size_text(size), size_text(other)
    (number, unit), (other_number, other_unit) = text.split(), other_text.split()
    scale = _FACTORS[unit]
    if unit != other_unit or f"{abs(float(number) - float(other_number)):.1f}" == f"{abs(size - other) / scale:.1f}":
        return text, other_text
    return f"{size / scale:.2f} {unit}", f"{other / scale:.2f} {unit}"


def growth_rate_text(bytes_per_minute: float) -> str:
    """Format growth that is known roughly, with two digits in the unit that `size_text` uses: ``about 840 MiB/min``.

    The text is the same in the next seconds.
    """
    number, unit = size_text(bytes_per_minute).split()
    rough = float(f"{float(number):.2g}")
    return f"about {rough:.{1 if abs(rough) < 10 and unit != 'B' else 0}f} {unit}/min"


def require_encodable(value: object) -> None:
    """Search dicts, lists and tuples. Raises ValueError. Each container is visited once: otherwise aliases in YAML
    could make a value exponentially large.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError as error:
                character = ascii(each[error.start])
                raise ValueError(
                    f"text contains {character}, half of a surrogate pair, which UTF-8 can't encode; remove it or "
                    "write the whole character"
                ) from None
        elif isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            pending += [*each, *each.values()] if isinstance(each, dict) else each


def has_control_characters(text: str) -> bool:
    return any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text)


def accepts(header: str, name: str) -> bool:
    """Return whether an ``Accept`` or ``Accept-Encoding`` header lists the name, unless with weight 0."""
    for item in header.lower().split(","):
        listed, *parameters = (part.replace(" ", "") for part in item.split(";"))
        if listed == name:
            return not any(_ZERO_WEIGHT.fullmatch(parameter) for parameter in parameters)
    return False


_ZERO_WEIGHT = re.compile(r"q=0(\.0*)?")


def backoff_seconds(first_seconds: float, failures: int, longest_seconds: float) -> float:
    """Return the seconds before another attempt: they double with each failure, up to the longest."""
    return min(longest_seconds, first_seconds * 2.0 ** max(0, min(failures, 30)))  # 2.0 ** 1024 raises OverflowError
