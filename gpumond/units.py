"""Durations, levels and sizes as people write and read them: ``90s``, ``80%``, ``1GiB``. Pure."""

from __future__ import annotations

import re

_DURATION = re.compile(r"\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SECONDS: dict[str | None, float] = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_LEVEL = re.compile(r"(-?\d+(?:\.\d+)?)\s*(%|B|[KMGT]iB|[kMGT]B)?")
_FACTORS: dict[str | None, float] = {
    "B": 1,
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGT")},
    None: 1,
}


def seconds(value: object) -> float:
    """Seconds from a number or from text as in ``1.5s``, ``5m``, ``1h30m``. Raises ValueError."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("expected a duration such as 30s, 5m or 1h")
    return sum(float(number) * _SECONDS[unit or None] for number, unit in _PART.findall(match[0]))


def level(value: object) -> float:
    """A plain number from ``0.8``, ``80%`` (0.8), ``1GiB`` (bytes). Raises ValueError."""
    match = _LEVEL.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ValueError("expected a number, a share such as 80% or a size such as 1GiB")
    number = float(match[1])
    return number / 100 if match[2] == "%" else number * _FACTORS[match[2]]


def duration(seconds: float) -> str:
    """For people: ``45 s``, ``34 min``, ``2 h 5 min``, ``3 d 4 h``."""
    for whole, part, size in (("d", "h", 86400), ("h", "min", 3600)):
        if seconds >= size:
            rest = int(seconds % size // _SECONDS[part[0]])
            return f"{int(seconds // size)} {whole}" + (f" {rest} {part}" if rest else "")
    return f"{int(seconds // 60)} min" if seconds >= 60 else f"{seconds:.0f} s"


def times(count: int) -> str:
    """``once``, ``2 times``."""
    return "once" if count == 1 else f"{count} times"


def human(size: float) -> str:
    """Bytes for people: ``31.2 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
