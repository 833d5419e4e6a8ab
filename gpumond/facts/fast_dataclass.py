"""Dataclasses of which a tick makes one or more for each process."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["fast_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as fast_dataclass
else:
    from dataclasses import dataclass

    def fast_dataclass(*, frozen, **options):
        """Make a dataclass that only mypy freezes: Python takes four times as long to make a frozen object.

        Nothing may change such an object: several frames may contain it.
        """
        return dataclass(unsafe_hash=frozen, **options)
