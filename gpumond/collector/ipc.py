"""Messages between the collector and its child process, and the shared position of the child."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from gpumond.errors import FaultKind, ReturnCode
from gpumond.model.snapshot import Reading


@dataclass(frozen=True, slots=True)
class ExcludedDevice:
    """A device that the child must not ask, since the driver hangs or crashes at it."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One line to the child that runs a source: read, but leave out these."""

    leave_out: tuple[ExcludedDevice, ...] = ()


class DevicePosition:
    """Which device the child is at, in a file in memory that its parent can read while the child hangs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def at(self, index: int) -> None:
        os.pwrite(self._descriptor, index.to_bytes(4, "little", signed=True), 0)

    def where(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 4, 0), "little", signed=True)


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """One line from the child that runs a source: opened (empty), a reading, or why there is none."""

    reading: Reading | None = None
    reason: FaultKind | ReturnCode | Literal[""] = ""
    message: str = ""
