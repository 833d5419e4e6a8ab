"""Regular expressions of silences.

They are those of pydantic (written in Rust): the time to match is linear in the length of the text, so that no
expression can block the daemon. The time and memory to compile one are not: eleven characters can need 21 MiB. They are
estimated from the text, and limited, before it is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from gpumond.errors import ConfigError
from gpumond.model.units import human

MAX_EXPRESSION = 128
"""Characters of a regular expression."""
MAX_COMPILED_BYTES = 1 << 20
"""Memory of one compiled expression, as `compiled_bytes` estimates it."""

_CHARACTER, _CLASS, _DIGITS, _LETTERS = 2 << 10, 8 << 10, 20 << 10, 128 << 10
r"""Bytes of the compiled form of a character, a class such as [a-z], \d, and \w, which has 140,000 characters"""
_ESCAPE = r"\\(?:[xuUpP]\{[^}]*\}|[pP].|.)"
_INNER = rf"\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]"
_TOKEN = re.compile(
    rf"(?P<flags>\(\?[imsu-]+\))|(?P<open>\((?:\?(?:[imsu-]*:|P?<\w+>))?)(?!\?)|(?P<close>\))"
    r"|\{(?P<least>\d+)(?P<range>,(?P<most>\d*))?\}|(?P<other>[*+?|^$])"
    rf"|(?P<class>\[\^?\]?(?:{_ESCAPE}|{_INNER}|[^\]\\\[])*\]|\.)|(?P<character>{_ESCAPE}|[^(\[\\])",
    re.DOTALL,
)


def compiled(text: str) -> Callable[[str], bool]:
    """Return a function that tests whether an expression matches the whole of a text. Raises ConfigError."""
    compiled_bytes(text)
    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"\A(?s:{text})\z")])
    except SchemaError as error:
        raise _invalid(re.sub(r"(?s).*error: ", "", str(error))[:200]) from None

    def matches(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return matches


def compiled_bytes(text: str) -> int:
    """Return an upper estimate of the memory of a compiled expression, from its classes and counted repetitions.

    Raises ConfigError if it is too long or too expensive, or is no complete expression: "a)|(b" would be valid within a
    group only.
    """
    if len(text) > MAX_EXPRESSION:
        raise ConfigError(f"the regular expression exceeds {MAX_EXPRESSION} characters; use several silences")
    groups: list[int] = []
    total = last = end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            what = "an unclosed or nested class, a look-around, or a flag other than i, m, s and u"
            raise _invalid(f"{text[end : end + 8]!r} is {what}")
        end = token.end()
        if token["open"]:
            groups.append(total)
            total = last = 0
        elif token["close"]:
            if not groups:
                raise _invalid("unopened group")
            last = total + _CHARACTER
            total = groups.pop() + last
        elif token["least"]:
            times = max(1, int(token["most"] or token["least"]) + (token["range"] == ","))
            total += last * (times - 1)
            last *= times
        elif token["class"] or token["character"]:
            last = _bytes_of(token[0], _CLASS if token["class"] else _CHARACTER)
            total += last
    if groups:
        raise _invalid("unclosed group")
    if total > MAX_COMPILED_BYTES:
        raise ConfigError(
            f"the regular expression needs {human(total)} of memory, more than {human(MAX_COMPILED_BYTES)}; shorten "
            r"repetitions such as {200}, and write [a-z0-9_] instead of \w"
        )
    return total


def _bytes_of(part: str, least: int) -> int:
    kinds = re.findall(r"\\(.)", part, re.DOTALL)
    return least + sum(_LETTERS if kind in "wWpP" else _DIGITS if kind in "dDsS" else 0 for kind in kinds)


def _invalid(reason: str) -> ConfigError:
    return ConfigError(f"not a regular expression: {reason}; expected one such as train.*")
