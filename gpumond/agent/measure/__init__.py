"""Functions that a program calls: scopes, steps, retries and snapshots.

This module determines the kinds of functions that a decorator may receive, without importing `inspect`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COROUTINE, GENERATOR, ASYNC_GENERATOR = 0x80, 0x20, 0x200
"""As in `inspect`: flags of a function's code."""


def is_async(function: Callable[..., Any]) -> bool:
    return bool(_flags(function) & COROUTINE)


def refuse_generators(call: str, function: object) -> None:
    """Raise TypeError for objects that cannot be wrapped."""
    if not callable(function):
        raise TypeError(f"{call}: expected a function to decorate, got {type(function).__name__}")
    if _flags(function) & (GENERATOR | ASYNC_GENERATOR):
        raise TypeError(f"{call}: can't decorate a generator function, whose body runs later; use it inside the body")


def _flags(function: Any) -> int:
    function = getattr(function, "__func__", function)
    return int(getattr(getattr(function, "__code__", None), "co_flags", 0))
