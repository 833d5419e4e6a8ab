"""Text that comes from outside, over HTTP or in YAML: only what UTF-8 can encode is taken."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator


class Encodable(BaseModel):
    """Base of each model of a request's body and of the configuration. Any text in its input, keys and unknown keys
    included, must be encodable in UTF-8: what is kept can then be written by each endpoint."""

    @model_validator(mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        require_encodable(value)
        return value


def require_encodable(value: object) -> None:
    """Look into dicts, lists and tuples. Raises ValueError. Takes each container once: YAML's aliases can make a value
    that is exponentially large otherwise."""
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
                    f"text holds {found}, half of a surrogate pair, which UTF-8 cannot encode; remove it or write the "
                    "whole character"
                ) from None
        elif isinstance(each, (dict, list, tuple)) and id(each) not in seen:
            seen.add(id(each))
            waiting += [*each, *each.values()] if isinstance(each, dict) else each


def has_control_characters(text: str) -> bool:
    return any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text)
