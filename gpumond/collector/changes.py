"""Readings on the pipe: a process that has not changed since the previous reading is sent as its pid only.

A process list seldom changes within a second, and encoding and decoding it takes more time than the driver's calls. The
daemon also keeps one object for an unchanged process, instead of a new one for each reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpumond.errors import ProtocolError
from gpumond.model.snapshot import DeviceReading, ProcessUsage, Reading

Pids = tuple[tuple[int, ...], ...]
Processes = Mapping[int, ProcessUsage]


class ReadingChanges:
    """Either end of the pipe of one child. Both ends see all readings, in the same order."""

    def __init__(self) -> None:
        self._before: Mapping[str, Processes] = {}
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
            raise ProtocolError("reading", f"a reading names a process that was not sent: {error}") from None
        self._keep(reading)
        return reading

    def _changed(self, device: DeviceReading) -> DeviceReading:
        if device.processes is None:
            return device
        before = self._before.get(device.uuid, {})
        news = tuple(
            process
            for process in device.processes
            if (known := before.get(process.pid)) is not process and known != process
        )
        return replace(device, processes=news)

    def _complete(self, device: DeviceReading, pids: tuple[int, ...]) -> DeviceReading:
        if device.processes is None:
            return device
        known = {**self._before.get(device.uuid, {}), **{process.pid: process for process in device.processes}}
        return replace(device, processes=tuple(known[pid] for pid in pids))

    def _keep(self, reading: Reading) -> None:
        self._before = {
            device.uuid: {process.pid: process for process in device.processes or ()} for device in reading.devices
        }
