"""Long work in steps, so that its caller can interrupt it between two of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[None, None, T]
"""Yields after each step, and returns the result."""


def run_to_end(work: Steps[T]) -> T:
    """From beginning to end."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def synchronous(work: Callable[P, Steps[T]]) -> Callable[P, T]:
    """The function that does the same at once."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_to_end(work(*args, **kwargs))

    return done
