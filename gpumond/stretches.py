"""Work that takes long, in stretches: between two of them others may have their turn. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Stretches = Generator[None, None, T]
"""Yields after each stretch, and returns what came of it."""


def at_once(work: Stretches[T]) -> T:
    """From beginning to end."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
