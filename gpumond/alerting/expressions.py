"""Regular expressions of silences.

They are those of pydantic (written in Rust): the time to match is linear in the length of the text, so that no
expression can block the daemon.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from gpumond.errors import ConfigError

MAX_EXPRESSION = 128
"""Characters of a regular expression."""


def compiled(text: str) -> Callable[[str], bool]:
    """Return a function that tests whether an expression matches the whole of a text. Raises ConfigError."""
    if len(text) > MAX_EXPRESSION:
        raise ConfigError(f"the regular expression exceeds {MAX_EXPRESSION} characters; use several silences")
    try:
        _adapter(text)  # alone: "a)|(b" is valid within a group only
        adapter = _adapter(rf"\A(?s:{text})\z")
    except SchemaError as error:
        reason = re.sub(r"(?s).*error: ", "", str(error))
        raise ConfigError(f"not a regular expression: {reason:.200}; expected one such as train.*") from None

    def matches(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return matches


def _adapter(pattern: str) -> TypeAdapter[str]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])
