"""The child process that owns the driver, its supervisor, and the messages between them.

This module contains the messages, and the position of the child that both processes share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from gpumond.errors import FaultKind, ReturnCode
from gpumond.model.snapshot import Reading


@dataclass(frozen=True, slots=True)
class ExcludedDevice:
    """Device that the child must not query, because the driver hangs or crashes on it."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Request line to the child: read all devices except the excluded ones."""

    leave_out: tuple[ExcludedDevice, ...] = ()


class DevicePosition:
    """Index of the device that the child is querying, in shared memory that its parent can read while the child
    hangs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def at(self, index: int) -> None:
        os.pwrite(self._descriptor, index.to_bytes(4, "little", signed=True), 0)

    def where(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 4, 0), "little", signed=True)


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """Response line from the child: opened (empty), a reading, or the reason why there is none.

    ``reading`` and ``pids`` are those of `ReadingChanges.encode`.
    """

    reading: Reading | None = None
    pids: tuple[tuple[int, ...], ...] = ()
    reason: FaultKind | ReturnCode | Literal[""] = ""
    message: str = ""
