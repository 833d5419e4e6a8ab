"""Text of a problem in the configuration: place, key, value and expectation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def key_at(location: Sequence[object]) -> str:
    """Return the text of a location, such as ``rules[0].above``."""
    named = location if location[:1] != ("receivers",) else (*location[:2], *location[3:])  # without the type
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named).lstrip(".")


def explain(
    error: Any,
    origin: Mapping[str, str],
    where: str,
    model: Callable[[Sequence[object]], type[BaseModel]],
    receivers: Mapping[str, type[BaseModel]],
) -> str:
    """Return one line for an error of pydantic.

    ``origin``: the places of the settings, by name; ``where``: that of the others. ``model`` returns the model of the
    key at a location, ``receivers`` are those of receivers by type.
    """
    location = error["loc"]
    place = origin.get(str(location[0]), where) if location else where
    key = key_at(location)
    if error["type"] == "extra_forbidden":
        own = model(location)
        known = [field.alias or name for name, field in own.model_fields.items()]
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        if location[0] == "receivers" and any(location[-1] in each.model_fields for each in receivers.values()):
            return f"{place}: {key}: not a key of type {location[2]}; expected one of {', '.join(known)}"
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        return f"{place}: {key}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{place}: {message}"
    shown = (
        ""
        if isinstance(error["input"], dict) or location[-1] in ("url", "metrics_url")
        else f" {error['input']!r:.80}:"
    )
    return f"{place}: {key}:{shown} {message[:1].lower()}{message[1:]}"
