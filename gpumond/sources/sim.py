"""Simulated devices (gpumond.sim.device): all those in the directory that GPUMOND_SIM_DIR names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpumond import __version__
from gpumond.errors import SourceUnavailable
from gpumond.model.remedies import remedy
from gpumond.model.snapshot import DeviceReading, Fault, Reading
from gpumond.sim.device import Damaged, simulated_devices
from gpumond.sources.process.procfs import ProcessOwner, ProcessTable


class SimSource:
    name = "sim"

    @staticmethod
    def detect(sys: str) -> bool:
        return False

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._root = Path()
        self._table = ProcessTable()
        self._known: dict[tuple[int, int | None], ProcessOwner] = {}
        self._seen: dict[Path, str] = {}
        """UUIDs of devices that have been read once; they are reported as lost if they cannot be read."""

    def open(self) -> None:
        directory = self._environ.get("GPUMOND_SIM_DIR")
        if not directory:
            raise SourceUnavailable("unset", f"GPUMOND_SIM_DIR is not set: {remedy('unset')}")
        self._root = Path(directory)
        if not self._root.is_dir():
            raise SourceUnavailable(
                "missing", f"GPUMOND_SIM_DIR names {directory}, which is not a directory: {remedy('missing')}"
            )

    def read(self) -> Reading:
        devices: list[DeviceReading] = []
        faults: list[Fault] = []
        present = simulated_devices(self._root)
        for simulated in present:
            try:
                device = simulated.read()
            except Damaged as error:
                faults.append(Fault(self.name, "damaged", self._seen.get(simulated.directory), str(error)))
            else:
                self._seen[simulated.directory] = device.uuid
                devices.append(device)
        for directory in self._seen.keys() - {simulated.directory for simulated in present}:
            faults.append(Fault(self.name, "lost", self._seen[directory], f"{directory} is gone"))
        devices.sort(key=lambda device: device.index)
        known, self._known = self._known, {}
        named = tuple(self._named(device, known) for device in devices)
        return Reading(devices=named, faults=tuple(faults), driver_version=f"sim {__version__}")

    def close(self) -> None:
        self._seen.clear()

    def _named(self, device: DeviceReading, known: Mapping[tuple[int, int | None], ProcessOwner]) -> DeviceReading:
        """Return the device with names and owners of its processes, each looked up once per process."""
        processes = []
        for process in device.processes or ():
            life = process.key
            identity = self._known[life] = known.get(life) or self._table.read([process.pid])[process.pid]
            if identity.start_ticks == process.start_ticks:
                process = replace(process, comm=identity.comm, uid=identity.uid, user=identity.user)
            processes.append(process)
        return replace(device, processes=tuple(processes))
