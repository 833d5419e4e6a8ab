"""Long computations in steps, between which the event loop serves other requests. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import wraps
from itertools import islice
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[None, None, T]
"""A computation that yields after each step and returns its result."""


def collecting(values: Iterable[T], at_once: int = 64) -> Steps[tuple[T, ...]]:
    """Return all values as a tuple; a step ends after ``at_once`` of them."""
    iterator = iter(values)
    collected: list[T] = []
    while some := tuple(islice(iterator, at_once)):
        collected += some
        yield
    return tuple(collected)


def run_to_end(work: Steps[T]) -> T:
    """Run all slices without a break and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result


def synchronous(work: Callable[P, Steps[T]]) -> Callable[P, T]:
    """Return a function that runs all slices without a break."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_to_end(work(*args, **kwargs))

    return done
