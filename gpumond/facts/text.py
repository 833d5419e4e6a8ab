"""Text from outside, over HTTP or in YAML: only text that UTF-8 can encode is accepted."""

from __future__ import annotations

import re


def require_encodable(value: object) -> None:
    """Search dicts, lists and tuples. Raises ValueError. Each container is visited once: otherwise aliases in YAML
    could make a value exponentially large.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError as error:
                found = ascii(each[error.start])
                raise ValueError(
                    f"text contains {found}, half of a surrogate pair, which UTF-8 cannot encode; remove it or "
                    "write the whole character"
                ) from None
        elif isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            waiting += [*each, *each.values()] if isinstance(each, dict) else each


def has_control_characters(text: str) -> bool:
    return any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text)


def accepts(header: str, name: str) -> bool:
    """Return whether an ``Accept`` or ``Accept-Encoding`` header lists the name, unless with weight 0."""
    for item in header.lower().split(","):
        listed, *parameters = (part.replace(" ", "") for part in item.split(";"))
        if listed == name:
            return not any(_ZERO.fullmatch(parameter) for parameter in parameters)
    return False


_ZERO = re.compile(r"q=0(\.0*)?")
