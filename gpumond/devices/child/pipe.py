"""The child process that owns the driver, its supervisor, and the messages between them.

This module contains the messages, and the position of the child that both processes share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpumond.facts.errors import FaultKind, ProtocolError, ReturnCode
from gpumond.facts.snapshot import CgroupLimitChange, DeviceReading, ProcessUsage, Reading


@dataclass(frozen=True, slots=True)
class ExcludedDevice:
    """Device that the child must not query, because the driver hangs or crashes on it."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Request line to the child: read all devices except the excluded ones, after these changes."""

    leave_out: tuple[ExcludedDevice, ...] = ()
    limit_changes: tuple[CgroupLimitChange, ...] = ()


class DevicePosition:
    """Index of the device that the child is querying, in shared memory that its parent can read while the child
    hangs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def set_index(self, index: int) -> None:
        os.pwrite(self._descriptor, index.to_bytes(4, "little", signed=True), 0)

    def index(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 4, 0), "little", signed=True)


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """Response line from the child: opened (empty), a reading, or the reason why there is none.

    ``reading`` and ``pids`` are those of `ReadingCodec.encode`.
    """

    reading: Reading | None = None
    pids: tuple[tuple[int, ...], ...] = ()
    reason: FaultKind | ReturnCode | Literal[""] = ""
    message: str = ""


Pids = tuple[tuple[int, ...], ...]
ProcessesByPid = Mapping[int, ProcessUsage]


class ReadingCodec:
    """Either end of the pipe of one child. Both ends see all readings, in the same order."""

    def __init__(self) -> None:
        self._before: Mapping[str, ProcessesByPid] = {}
        """Processes of the previous reading by UUID and pid."""

    def encode(self, reading: Reading) -> tuple[Reading, Pids]:
        """Return the reading with only the new and the changed processes, and the pids of each device's processes."""
        pids = tuple(tuple(process.pid for process in device.processes or ()) for device in reading.devices)
        devices = tuple(map(self._changed, reading.devices))
        self._keep(reading)
        return replace(reading, devices=devices), pids

    def decode(self, changed: Reading, pids: Pids) -> Reading:
        """Return the reading that the other end encoded. Raises ProtocolError if it names an unknown process."""
        devices = zip(changed.devices, pids, strict=True)
        try:
            reading = replace(changed, devices=tuple(self._complete(device, listed) for device, listed in devices))
        except (KeyError, ValueError) as error:
            raise ProtocolError("reading", f"a reading names a process that wasn't sent: {error}") from None
        self._keep(reading)
        return reading

    def _changed(self, device: DeviceReading) -> DeviceReading:
        if device.processes is None:
            return device
        before = self._before.get(device.uuid, {})
        changed = tuple(
            process
            for process in device.processes
            if (previous := before.get(process.pid)) is not process and previous != process
        )
        return replace(device, processes=changed)

    def _complete(self, device: DeviceReading, pids: tuple[int, ...]) -> DeviceReading:
        if device.processes is None:
            return device
        by_pid = {**self._before.get(device.uuid, {}), **{process.pid: process for process in device.processes}}
        return replace(device, processes=tuple(by_pid[pid] for pid in pids))

    def _keep(self, reading: Reading) -> None:
        self._before = {
            device.uuid: {process.pid: process for process in device.processes or ()} for device in reading.devices
        }
