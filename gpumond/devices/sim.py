"""Simulated devices (gpumond.sim.device): all those in the directory that GPUMOND_SIM_DIR names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpumond import __version__
from gpumond.devices.process.procfs import ProcessIdentity, ProcessTable
from gpumond.facts.errors import SourceUnavailable, remedy
from gpumond.facts.snapshot import DeviceReading, Fault, Reading
from gpumond.sim.device import DamagedDeviceError, simulated_devices


class SimSource:
    name = "sim"

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._root = Path()
        self._table = ProcessTable()
        self._uuids: dict[Path, str] = {}
        """UUIDs of devices that have been read once; they are reported as lost if they cannot be read."""

    def open(self) -> None:
        directory = self._environ.get("GPUMOND_SIM_DIR")
        if not directory:
            raise SourceUnavailable("unset", f"no directory of simulated devices is set; {remedy('unset')}")
        self._root = Path(directory)
        if not self._root.is_dir():
            raise SourceUnavailable(
                "missing", f"GPUMOND_SIM_DIR names {directory}, which isn't a directory: {remedy('missing')}"
            )

    def read(self) -> Reading:
        devices: list[DeviceReading] = []
        faults: list[Fault] = []
        present = simulated_devices(self._root)
        for simulated in present:
            try:
                device = simulated.read()
            except DamagedDeviceError as error:
                faults.append(Fault(self.name, "damaged", self._uuids.get(simulated.directory), str(error)))
            else:
                self._uuids[simulated.directory] = device.uuid
                devices.append(device)
        for directory in self._uuids.keys() - {simulated.directory for simulated in present}:
            faults.append(Fault(self.name, "lost", self._uuids[directory], f"{directory} is gone"))
        devices.sort(key=lambda device: device.index)
        identities = self._table.read(process.pid for device in devices for process in device.processes or ())
        named = tuple(_with_identities(device, identities) for device in devices)
        return Reading(devices=named, faults=tuple(faults), driver_version=f"sim {__version__}")

    def close(self) -> None:
        self._uuids.clear()


def _with_identities(device: DeviceReading, identities: Mapping[int, ProcessIdentity]) -> DeviceReading:
    """Return the device with names and owners of its processes."""
    processes = []
    for process in device.processes or ():
        identity = identities[process.pid]
        if identity.start_ticks == process.start_ticks:
            process = replace(process, **identity._asdict())
        processes.append(process)
    return replace(device, processes=tuple(processes))
